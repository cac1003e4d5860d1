"""Routing replay: tokens of a mixture of experts go to the experts that vLLM chose (``--rollout.routing_replay``)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import ControllerFeature, EngineFeature, Feature
from openrlhf_gtpo.training.features.routing_replay.settings import ROUTING
from openrlhf_gtpo.training.settings.guard import EITHER_RUNNER_RETURNS_EXPERTS, other_vllm

if TYPE_CHECKING:
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.loss import LossFeature


def replay_routes(args: Arguments) -> Mapping[str, Any]:
    """Turn replay on where engines and backend support it."""
    from openrlhf_gtpo.training.features.routing_replay.check import can_replay

    return {"rollout.replays_routes": can_replay(args)}


class RoutingReplay(Feature):
    """vLLM returns the experts of each token (``vllm_capture.py``), rows carry them (``engine.py``), and in the ranks
    they replace the routers' own choice (``router.py``), in the old policy's forward and in training.
    """

    settings = ROUTING
    after = (replay_routes,)

    def is_on(self) -> bool:
        return self.args.rollout.replays_routes

    def for_model(self, model: "Model") -> Mapping[str, Any]:
        from openrlhf_gtpo.training.features.routing_replay.check import has_routes

        return {"rollout.replays_routes": has_routes(self.args, model)}

    def engine_args(self) -> dict[str, Any]:
        extension = f"{__name__}.vllm_capture.CapturingExtension"
        # The old policy's log-probs, with which the engines' are compared, are at the run's temperature.
        args: dict[str, Any] = {"logprobs_mode": "processed_logprobs"}
        if other_vllm(EITHER_RUNNER_RETURNS_EXPERTS):
            args["enable_prefix_caching"] = True
        return {"enable_return_routed_experts": True, "worker_extension_cls": extension} | args

    def engine(self) -> EngineFeature:
        from openrlhf_gtpo.training.features.routing_replay.engine import RoutingReplayInEngine

        return RoutingReplayInEngine()

    def loss(self) -> "LossFeature":
        from openrlhf_gtpo.training.features.routing_replay.rank import RoutingReplayInRank

        return RoutingReplayInRank()

    def controller(self) -> ControllerFeature:
        from openrlhf_gtpo.training.features.routing_replay.controller import RoutingReplayInController

        return RoutingReplayInController(self.args)
