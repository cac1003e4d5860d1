"""What keeps a run going, or ends it: engines that die or hang, ranks that die, silence, and steps that stand out."""

from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.supervision.settings import SUPERVISION


class SpikeWatch(Feature):
    settings = SUPERVISION

    def is_on(self) -> bool:
        return bool(self.args.train.spike_zscore)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.supervision.spikes import Spikes

        return Spikes(self.args)
