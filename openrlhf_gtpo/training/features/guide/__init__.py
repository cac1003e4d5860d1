"""A guiding policy (``--algo.guide.*``): a frozen, stronger model that answers a part of each group."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openrlhf_gtpo.platform import chosen_platform
from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.guide.settings import GUIDE
from openrlhf_gtpo.training.host import CPU_MEMORY_SHARE

if TYPE_CHECKING:
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature


class GuidingPolicy(Feature):
    settings = GUIDE

    def is_on(self) -> bool:
        # Rows that this run does not sample may have been a guide's.
        return bool(self.args.algo.guide.model_name_or_path) or not self.args.rollout.is_sampled

    def settle(self) -> Mapping[str, Any]:
        """Take as little of a CPU host's memory as the policy's engines do."""
        if chosen_platform() != "cpu":
            return {}
        share = min(self.args.algo.guide.gpu_memory_utilization, CPU_MEMORY_SHARE)
        return {"algo.guide.gpu_memory_utilization": share}

    def check(self, model: "Model") -> None:
        from openrlhf_gtpo.training.features.guide.check import check_guide

        check_guide(self.args, model)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.guide.controller import GuideInController

        return GuideInController(self.args)

    def engine_args(self) -> dict[str, Any]:
        # The policy's rows carry their engine's log-probs too: either all rows of a group do, or none.
        return {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}

    def loss(self) -> "LossFeature":
        from openrlhf_gtpo.training.features.guide.loss import GuideRatios

        return GuideRatios(self.args.algo.guide.ratio_cap)
