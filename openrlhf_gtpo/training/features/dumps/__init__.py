"""Rollouts on disk (``--logger.dump_rollouts``), and training on them (``--train.replay_rollouts``)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import ControllerFeature, Feature
from openrlhf_gtpo.training.features.dumps.settings import ABSENT, DUMPS, REPLAY, leave_out_sampling

if TYPE_CHECKING:
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature


class Dumps(Feature):
    settings = DUMPS

    def is_on(self) -> bool:
        return bool(self.args.logger.dump_rollouts)

    def check(self, model: "Model") -> None:
        from openrlhf_gtpo.training.features.dumps.check import check_folder

        check_folder(self.args)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.dumps.dumper import RolloutDumper

        return RolloutDumper(self.args)

    def loss(self) -> "LossFeature":
        from openrlhf_gtpo.training.features.dumps.ratios import TokenRatios

        return TokenRatios()


def take_out_engines(args: Arguments) -> Mapping[str, Any]:
    """Take engines and reward actor out of a replay, after OpenRLHF's own checks, which want both."""
    return {"vllm.num_engines": 0, "reward.remote_url": (ABSENT,)} if args.train.replay_rollouts else {}


class Replay(Feature):
    settings = REPLAY
    before = (leave_out_sampling,)
    after = (take_out_engines,)

    def is_on(self) -> bool:
        return bool(self.args.train.replay_rollouts)

    def check(self, model: "Model") -> None:
        from openrlhf_gtpo.training.features.dumps.check import check_dumps

        check_dumps(self.args, model)

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.dumps.replay import ReplayInController

        return ReplayInController(self.args)
