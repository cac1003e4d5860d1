"""The Ray actor around a vLLM engine, with the bucketed weight transfer, rewards that must arrive, and requests whose
samples do not depend on timing.

vLLM samples from one generator for all requests; on CPU the last bits of a matrix product depend on its rows: which
requests share a forward pass decides what each says. Under full determinism a request therefore has a seed of its own,
and on CPU the engine to itself: its response follows from the weights, the prompt and the seed, whatever else waits
(a filtered prompt's replacement, an agent's next turn) and on however many engines. The engine to itself can go once
vLLM's batch invariance, in 0.29 for CUDA alone, covers CPUs: https://github.com/vllm-project/vllm/issues/27433.
"""

import asyncio
import os
import traceback
from collections.abc import Awaitable
from contextvars import ContextVar
from copy import copy
from typing import Any

import ray
import torch
from openrlhf.trainer.ray import vllm_engine
from openrlhf.utils.agent import SingleTurnAgentExecutor

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.integration.rollout.samples_generator import NumberedLabel, request_seed
from openrlhf_gtpo.weight_sync.buckets import Bucket
from openrlhf_gtpo.weight_sync.receipts import Receipt

_UpstreamRolloutActor: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class

WORKER_EXTENSION = "openrlhf_gtpo.integration.rollout.worker_extension.WorkerExtension"

_ALONE = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": None,  # as vLLM wants it for whole prompts
    "enable_prefix_caching": False,  # the first response to a prompt would be computed otherwise than the next
    # After a chunk of a prompt vLLM rewinds its generator's offset, which a CPU's lacks. Can go once it spares CPUs
    # that (vllm 0.29.0, v1/worker/gpu_model_runner.py, _bookkeeping_sync).
    "enable_chunked_prefill": False,
}

_FAILURE = "failure"  # among a response's extra logs: what its reward raised

# The sample that the current task makes; an agent may hand on sampling parameters of its own, without a seed.
_sample_seed: ContextVar[tuple[int, ...] | None] = ContextVar("_sample_seed", default=None)


class StrictRewardExecutor(SingleTurnAgentExecutor):
    """Raises TrainingStopped with the reason and the prompt when the reward function or server fails, or returns
    anything but one number, of which a list or tensor may be made.

    Upstream logs a failed reward and goes on without one, and makes rows of (1,) lists, as its own reward server
    answers, a column (openrlhf 0.11.2, utils/agent.py, SingleTurnAgentExecutor.execute). Can go once that raises.
    """

    async def execute(self, prompt: str, label: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        output = await super().execute(prompt, label, *args, **kwargs)
        if not self.reward_endpoints:
            return output
        returned = {"reward": "rewards", "scores": "scores"}
        try:
            for name in returned:
                output[name] = torch.as_tensor(output[name], dtype=torch.float64).reshape(()).item()
        except (TypeError, ValueError, RuntimeError, OverflowError):
            endpoint, logs = self.reward_endpoints[0], output["extra_logs"]
            failure = logs.get(_FAILURE) if isinstance(logs, dict) else None
            reason = "it returned no 'rewards'"
            if output["reward"] is not None:
                got = f"{returned[name]!r} {str(output[name])[:200]!r}"
                reason = f"expected one number for the one response, got {got}"
            if failure is not None:
                frames = traceback.extract_tb(failure.__traceback__)
                frame = ([f for f in frames if f.filename == os.path.abspath(endpoint)] or frames)[-1]
                text = " ".join(str(failure).split())[:500]
                reason = f"{type(failure).__name__}: {text} ({frame.filename}, line {frame.lineno})"
            raise TrainingStopped(
                f"Could not get the reward of a response from {endpoint}: {reason}. Prompt: {prompt!r}"
            ) from failure
        try:
            for value in output["extra_logs"].values():  # the controller makes a tensor of each
                torch.as_tensor(value, dtype=torch.float64).flatten()[0]
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise TrainingStopped(
                f"Expected 'extra_logs' of names with a number each from {self.reward_endpoints[0]}, got "
                f"{str(output['extra_logs'])[:200]!r}. Prompt: {prompt!r}"
            ) from error
        return output

    async def _fetch_rewards_via_func(self, *columns: Any) -> list[dict[str, Any]]:
        return await _or_failure(super()._fetch_rewards_via_func(*columns))

    async def _fetch_rewards_via_http(self, *columns: Any) -> list[dict[str, Any]]:
        return await _or_failure(super()._fetch_rewards_via_http(*columns))


async def _or_failure(rewards: Awaitable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What upstream's ``execute`` takes for a response without a reward, where fetching raises."""
    try:
        return await rewards
    except Exception as failure:  # a user's code
        return [{"rewards": None, "extra_logs": {_FAILURE: failure}}]


class StrictRolloutActor(_UpstreamRolloutActor):  # type: ignore[misc]
    """Upstream's rollout actor; its vLLM workers also know how to receive buckets.

    Fields:
        engine_args: vLLM's that upstream's ``create_vllm_engines`` has no place for (``patch.apply``).
    """

    executor: Any
    engine_args: dict[str, Any] = {}

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs |= {"worker_extension_cls": WORKER_EXTENSION} | self.engine_args
        on_cpu = platform.chosen_platform() == "cpu"
        if on_cpu and kwargs.get("full_determinism"):
            kwargs |= _ALONE
        if not on_cpu:
            # Experts' weights stay as they are loaded. The kernels that vLLM prefers on Blackwell have them swapped or
            # shuffled, which a transfer would write over (vllm 0.29.0, model_executor/layers/fused_moe/oracle/
            # unquantized.py, convert_to_unquantized_kernel_format). On Hopper it is vLLM's own choice.
            kwargs["moe_backend"] = "triton"
        await super().__init__(*args, **kwargs)
        if type(self.executor) is SingleTurnAgentExecutor:
            self.executor = StrictRewardExecutor(self.executor.reward_endpoints)

    async def generate_responses(
        self, prompt: str, label: Any, *args: Any, num_samples: int = 1, **kwargs: Any
    ) -> list[dict[str, Any]]:
        """As upstream's; responses to a numbered prompt carry its number as ``prompt_number``."""
        respond = super().generate_responses
        if not isinstance(label, NumberedLabel):  # upstream's asynchronous trainer
            return await respond(prompt, label, *args, num_samples=num_samples, **kwargs)

        async def sample(index: int) -> dict[str, Any]:
            _sample_seed.set(label.seed and (*label.seed, index))
            [response] = await respond(prompt, label.label, *args, num_samples=1, **kwargs)
            return response | {"prompt_number": label.number}

        return await asyncio.gather(*(sample(index) for index in range(num_samples)))

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """As upstream's; every turn of a seeded sample, told apart by its length, has a seed of its own."""
        key = _sample_seed.get()
        if key is not None:
            sampling_params = copy(sampling_params)
            sampling_params.seed = request_seed(*key, len(prompt_token_ids))
        return await super().generate(prompt_token_ids, sampling_params, multi_modal_data)

    async def join_weight_group(self, *args: Any) -> list[None]:
        """See ``WeightReceiver.join_weight_group``; one result per worker, here as below."""
        return await self.llm.collective_rpc("join_weight_group", args=args)

    async def receive_weights(self, buckets: list[Bucket], prove: bool) -> list[Receipt | None]:
        """See ``WeightReceiver.receive_weights``."""
        receipts = await self.llm.collective_rpc("receive_weights", args=(buckets, prove))
        await self._forget_prefixes()
        return receipts

    async def receive_bucket(
        self, bucket: Bucket, handles: dict[str, bytes], index: int, count: int, prove: bool
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
        go on with it, unless it is told to preempt them (https://github.com/vllm-project/vllm/pull/28827).
        """
        if self.kwargs["enable_prefix_caching"] and not await self.llm.reset_prefix_cache():
            assert self.get_num_unfinished_requests(), "vLLM kept prefixes of the old weights without a request"


RolloutActor = ray.remote(StrictRolloutActor)
