"""The Ray actor around a vLLM engine, with the bucketed weight transfer and rewards that must arrive."""

from typing import Any

import ray
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_gtpo.integration.rewards import StrictRewardExecutor

_UpstreamRolloutActor: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class

WORKER_EXTENSION = "openrlhf_gtpo.integration.worker_extension.WorkerExtension"


class StrictRolloutActor(_UpstreamRolloutActor):  # type: ignore[misc]
    """Upstream's rollout actor; its vLLM workers also know how to receive buckets."""

    executor: Any

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs["worker_extension_cls"] = WORKER_EXTENSION
        await super().__init__(*args, **kwargs)
        if type(self.executor) is SingleTurnAgentExecutor:
            self.executor = StrictRewardExecutor(self.executor.reward_endpoints)

    async def join_weight_group(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        """See ``WeightReceiver.join_weight_group``."""
        await self.llm.collective_rpc("join_weight_group", args=(host, port, rank_offset, world_size))

    async def receive_weights(self, buckets: list[list[tuple[str, tuple[int, ...]]]]) -> None:
        """See ``WeightReceiver.receive_weights``."""
        await self.llm.collective_rpc("receive_weights", args=(buckets,))


RolloutActor = ray.remote(StrictRolloutActor)
