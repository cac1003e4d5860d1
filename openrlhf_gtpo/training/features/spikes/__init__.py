"""Outlier steps, which end the run (``--train.spike_zscore``)."""

from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.spikes.settings import SPIKES


class SpikeWatch(Feature):
    settings = SPIKES

    def is_on(self) -> bool:
        return bool(self.args.train.spike_zscore)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.spikes.spikes import Spikes

        return Spikes(self.args)
