"""The settings of the watch for outlier steps."""

from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting

SPIKES = Group(
    "spikes",
    "stopping at a step that stands out from the steps before it",
    (
        Setting(
            "train.spike_zscore",
            0.0,
            "stop without saving when loss, KL or gradient norm is this many robust standard deviations above the "
            "median of the last 50 steps; 0 never stops",
            bounds=Bounds(at_least=0),
            page="openrlhf.md#what-is-not-finite",
        ),
    ),
)
