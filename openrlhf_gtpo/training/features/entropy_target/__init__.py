"""Holds the policy's entropy near a target (``--algo.entropy_target``), and ends a run whose entropy has collapsed
(``--algo.entropy_floor``)."""

from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.entropy_target.settings import ENTROPY_TARGET, measure_entropy


class EntropyTarget(Feature):
    settings = ENTROPY_TARGET
    before = (measure_entropy,)

    def is_on(self) -> bool:
        return bool(self.args.algo.entropy_target or self.args.algo.entropy_floor)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.entropy_target.controller import EntropyControl

        return EntropyControl(self.args)
