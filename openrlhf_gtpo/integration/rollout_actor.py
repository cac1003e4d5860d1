"""The Ray actor around a vLLM engine, with the bucketed weight transfer and rewards that must arrive."""

from typing import Any

import ray
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_gtpo.integration.rewards import StrictRewardExecutor
from openrlhf_gtpo.rollout.arrivals import Receipt
from openrlhf_gtpo.rollout.buckets import WireBucket

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

    async def join_weight_group(self, *args: Any) -> list[None]:
        """See ``WeightReceiver.join_weight_group``; one result per worker, here as below."""
        return await self.llm.collective_rpc("join_weight_group", args=args)

    async def receive_weights(self, buckets: list[WireBucket], prove: bool) -> list[Receipt | None]:
        """See ``WeightReceiver.receive_weights``."""
        receipts = await self.llm.collective_rpc("receive_weights", args=(buckets, prove))
        await self._forget_prefixes()
        return receipts

    async def receive_bucket(
        self, bucket: WireBucket, handles: dict[str, bytes], index: int, count: int, prove: bool
    ) -> list[Receipt | None]:
        """See ``WeightReceiver.receive_bucket``."""
        receipts = await self.llm.collective_rpc("receive_bucket", args=(bucket, handles, index, count, prove))
        if index + 1 == count:
            await self._forget_prefixes()
        return receipts

    async def take_peak_memory(self, phase: str) -> list[dict[str, int]]:
        """See ``ReportsPeakMemory``."""
        return await self.llm.collective_rpc("take_peak_memory", args=(phase,))

    async def _forget_prefixes(self) -> None:
        """Drop the keys and values that older weights left for prompts to come.

        While requests are paused in their middle (partial rollouts) vLLM keeps the cache, says so in its log, and they
        go on with it.
        """
        if self.kwargs["enable_prefix_caching"] and not await self.llm.reset_prefix_cache():
            assert self.get_num_unfinished_requests(), "vLLM kept prefixes of the old weights without a request"


RolloutActor = ray.remote(StrictRolloutActor)
