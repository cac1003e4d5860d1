"""The settings of the watch for steps that stand out."""

from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting

SPIKES = Group(
    "spikes",
    "what happens if a step stands out from those before it",
    (
        Setting(
            "train.spike_zscore",
            0.0,
            "stop without saving if loss, KL or gradient norm is this many deviations above that of the last 50 "
            "steps; 0 never",
            bounds=Bounds(at_least=0),
            page="openrlhf.md#what-is-not-finite",
        ),
    ),
)
