"""A guide (``--algo.guide.*``): a frozen, stronger policy that samples part of each group."""

from typing import TYPE_CHECKING, Any

from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.guide.settings import GUIDE, describe_guide

if TYPE_CHECKING:
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature


class GuidingPolicy(Feature):
    settings = GUIDE
    before = (describe_guide,)

    def is_on(self) -> bool:
        # Rows of a replay may come from a guide.
        return bool(self.args.algo.guide.model_name_or_path) or not self.args.rollout.is_sampled

    def check(self, model: "Model") -> None:
        from openrlhf_gtpo.training.features.guide.check import check_guide

        check_guide(self.args, model)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.guide.controller import GuideInController

        return GuideInController(self.args)

    def engine_args(self) -> dict[str, Any]:
        # The policy's rows need their engine's log-probs too: either all rows of a group have them, or none.
        return {"logprobs_mode": "processed_logprobs", "max_logprobs": 1}

    def loss(self) -> "LossFeature":
        from openrlhf_gtpo.training.features.guide.loss import GuideRatios

        return GuideRatios(self.args.algo.guide.ratio_cap)
