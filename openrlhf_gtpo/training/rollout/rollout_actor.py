"""The Ray actor around a vLLM engine: bucketed weight transfer, strict rewards, and samples that do not depend on
timing.

vLLM samples all requests from one generator, and on CPU the last bits of a matrix product depend on its rows. So a
request's samples depend on the other requests in its forward passes. Under full determinism, a request therefore has
its own seed and, on CPU, the engine to itself. Its response then follows from weights, prompt and seed, whatever else
waits (a filtered prompt's replacement, an agent's next turn), and with any number of engines. The engine to itself can
go once vLLM's batch invariance, CUDA-only in 0.29, covers CPUs: https://github.com/vllm-project/vllm/issues/27433.
"""

import asyncio
import os
import warnings
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from copy import copy, deepcopy
from functools import partial
from typing import Any

import numpy as np
import psutil  # vLLM and DeepSpeed depend on it
import ray
from openrlhf.trainer.ray import vllm_engine
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.platform.patience import others_work
from openrlhf_gtpo.training.checks.reward import load_agent
from openrlhf_gtpo.training.feature import EngineFeature
from openrlhf_gtpo.training.rollout.answers import Answer, give_log_probs, hold, values_of
from openrlhf_gtpo.training.rollout.rewards import (
    Patience,
    RewardFailed,
    StrictRewardExecutor,
    described,
    reason_of,
    refuse_taken_names,
)
from openrlhf_gtpo.training.rollout.turns import template_variables
from openrlhf_gtpo.training.rows import Dropped, Request, Row
from openrlhf_gtpo.training.settings.guard import why_no_scheduler
from openrlhf_gtpo.weight_sync.buckets import Bucket
from openrlhf_gtpo.weight_sync.receipts import Receipt

_UpstreamRolloutActor: Any = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class

WORKER_EXTENSION = "openrlhf_gtpo.training.rollout.worker_extension.WorkerExtension"
SCHEDULER = "openrlhf_gtpo.training.rollout.vllm_scheduler.make_scheduler"
IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"

_ALONE = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": None,  # required by vLLM for whole prompts
    "enable_prefix_caching": False,  # would compute a prompt's first response differently from the next
    # After a chunk of a prompt vLLM rewinds its generator's offset, which a CPU generator lacks. Can go once vLLM
    # stops doing so on CPU (vllm 0.29.0, v1/worker/gpu_model_runner.py, _bookkeeping_sync).
    "enable_chunked_prefill": False,
}

_MARK = "OPENRLHF_GTPO_ENGINE"  # environment variable of an engine's processes: the id of their actor

_LOOK_EVERY = 0.5  # seconds between checks that vLLM's process is alive

# Seed of the current task's sample; an agent may pass its own sampling parameters, without a seed.
_sample_seed: ContextVar[tuple[int, ...] | None] = ContextVar("_sample_seed", default=None)

# The current task's number of calls to the engine, by the length of their prompts.
_asked: ContextVar[Counter[int]] = ContextVar("_asked")

# The engine's answers behind the current task's response; None if it is not trained on.
_answers: ContextVar[list[Answer] | None] = ContextVar("_answers", default=None)


class EngineRestarted(RuntimeError):
    """Ray has restarted this engine, and the trainer's weights have not reached it yet."""


class StrictRolloutActor(_UpstreamRolloutActor):  # type: ignore[misc]
    """Upstream's rollout actor, with strict rewards and workers that receive weights in buckets.

    Fields:
        engine_args: vLLM arguments that upstream's ``create_vllm_engines`` does not take (``patch.apply``).
        patience: tries of rewards and agents; if there are several, a prompt whose tries all fail is dropped.
        features: the features' parts, called with requests and answers.
        gets_weights: whether the trainer sends it weights.
    """

    executor: Any
    engine_args: dict[str, Any] = {}
    patience = Patience()
    features: Sequence[EngineFeature] = ()
    gets_weights = True
    _has_old_weights = False
    _holds = False  # whether the engine has this package's scheduler
    _agent_path = ""
    _tokenizer: asyncio.Future[Any] | None = None

    async def __init__(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[misc]
        kwargs |= {"worker_extension_cls": WORKER_EXTENSION} | self.engine_args
        kwargs["disable_log_stats"] = True  # only a server would publish them
        self._holds = why_no_scheduler() is None
        if self._holds:
            kwargs["scheduler_cls"] = SCHEDULER
        on_cpu = platform.chosen_platform() == "cpu"
        if on_cpu and kwargs.get("full_determinism"):
            kwargs |= _ALONE
        binds_threads = os.environ.get("VLLM_CPU_OMP_THREADS_BIND") != "nobind"
        if on_cpu and kwargs.get("distributed_executor_backend") == "uni" and not binds_threads:
            # With "uni" vLLM would start an extra process for its one worker, to bind threads in it: 10 s of CPU time
            # (vllm 0.29.0, platforms/cpu.py, check_and_update_config).
            kwargs["distributed_executor_backend"] = IN_ENGINE
        if self.gets_weights and not on_cpu:
            # Keeps experts' weights as loaded: the kernels that vLLM prefers on Blackwell swap or shuffle them, which
            # a transfer would overwrite (vllm 0.29.0, model_executor/layers/fused_moe/oracle/unquantized.py,
            # convert_to_unquantized_kernel_format). On Hopper it is vLLM's own choice.
            kwargs["moe_backend"] = "triton"
        # Upstream makes it before the engine, so that a reward gets its memory before the engine takes the rest.
        vllm_engine.SingleTurnAgentExecutor = partial(StrictRewardExecutor, patience=self.patience)
        vllm_engine._load_agent_executor = load_agent
        self._agent_path = kwargs.get("agent_func_path") or ""
        await super().__init__(*args, **kwargs)
        self._death_watch = asyncio.create_task(_fail_calls_at_death(self.llm.engine_core))
        for feature in self.features:
            await feature.start(self.llm)
        if self._has_old_weights and kwargs["enable_sleep_mode"]:
            await self.sleep()  # as upstream's create_vllm_engines does at the first start

    def _configure_device_env(self, *args: Any, **kwargs: Any) -> None:
        """Like upstream's, which ``__init__`` calls first; also kill what the actor's last process left behind."""
        context = ray.get_runtime_context()
        actor = os.environ[_MARK] = context.get_actor_id()
        with warnings.catch_warnings():  # about Ray's own calls (ray 2.55.0, runtime_context.py)
            warnings.simplefilter("ignore")
            self._has_old_weights = bool(context.was_current_actor_reconstructed)
        # vLLM's own processes outlive their actor, and hold the GPU's memory.
        for process in psutil.process_iter() if self._has_old_weights else ():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get(_MARK) == actor:
                    process.kill()
        super()._configure_device_env(*args, **kwargs)

    async def sample(self, request: Request, params: Any, max_len: int, tokenizer: Any) -> list[Row] | Dropped:
        """Sample the rows of ``request``; returns why its reward or agent failed if the run may drop the prompt.

        Args:
            params: vLLM's sampling parameters.
            tokenizer: Ray's reference to it, in a list, because Ray replaces a bare one by a copy in each call.

        Raises:
            EngineRestarted, EngineDeadError: from :meth:`serves`.
            TrainingStopped: a mistake that the next prompt would repeat.
        """
        # The weights must be there; the tokenizer is loaded once for all calls.
        if self._has_old_weights:
            await self.serves()
        self._tokenizer = self._tokenizer or asyncio.ensure_future(tokenizer[0])
        tokenizer = await asyncio.shield(self._tokenizer)  # survives a cancelled call
        own_agent = not isinstance(self.executor, StrictRewardExecutor)

        async def respond(index: int) -> Row:
            # Context for ``generate``, which the agent or reward executor calls.
            _sample_seed.set(request.seed and (*request.seed, index))
            _asked.set(Counter())
            answers: list[Answer] | None = [] if request.is_trained else None
            _answers.set(answers)
            template_variables.set(request.variables or {})

            def ask() -> Awaitable[dict[str, Any]]:
                # Agents change the parameters in place; without a copy, one agent's first turn would limit the other
                # prompts (openrlhf 0.11.2, utils/agent.py).
                return self.executor.execute(
                    prompt=request.prompt,
                    label=request.label,
                    sampling_params=deepcopy(params),
                    max_length=max_len,
                    hf_tokenizer=tokenizer,
                    llm_engine=self,
                    images=request.images,
                )

            # The response, as a row with features' values.
            response = await (self.patience.ask(ask, "the agent") if own_agent else ask())
            if answers and not own_agent and params.logprobs is not None and response["rollout_log_probs"] is None:
                [(tokens, output)] = answers  # held back, because upstream would make a dict for each token
                log_probs = values_of(output.outputs[0])["log_prob"]
                response["rollout_log_probs"] = np.concatenate([np.zeros(len(tokens)), log_probs])
            row = Row.of_response(response, request.number, max_len, self.vocab_size() if own_agent else None)
            refuse_taken_names(row.logs, "--train.agent_func_path")
            for feature in self.features:
                feature.on_row(row, response, answers)
            return row

        # All responses, or the reason of the first failure.
        try:
            return await _all_or_none(*map(respond, range(request.first, request.first + request.samples)))
        except Exception as failure:  # a user's code
            is_mistake = isinstance(failure, TrainingStopped) and not isinstance(failure, RewardFailed)
            by_agent = own_agent and not isinstance(failure, TrainingStopped)
            if is_mistake or (self.patience.tries == 1 and not by_agent):
                raise
            await self.serves()  # raises if the engine has failed
            if self.patience.tries == 1:
                raise RewardFailed(
                    f"Could not get a response from {self._agent_path}: {reason_of(failure, self._agent_path)}. "
                    f"Prompt: {request.prompt!r}"
                ) from failure
            return Dropped(described(failure))

    def vocab_size(self) -> int | None:
        """Return the model's vocabulary size; None if it is not known here."""
        return self.llm.model_config.get_vocab_size()

    async def serves(self) -> None:
        """Return once vLLM answers.

        Raises:
            EngineRestarted: the engine would not sample from the current policy.
            EngineDeadError: vLLM's process died.
        """
        if self._has_old_weights:
            raise EngineRestarted("the engine was restarted and does not have the current weights yet")
        await self.llm.is_sleeping()

    async def generate(self, prompt_token_ids: list[int], sampling_params: Any, multi_modal_data: Any = None) -> Any:
        """Like upstream's, with a seed for every turn of a seeded sample, identified by its length, and for every
        retry of a turn by an agent.

        Raises:
            TrainingStopped: a feature cannot work with an agent's ``sampling_params``.
        """
        # Parameters: only the final output, text only for an agent, and the turn's own seed.
        key = _sample_seed.get()
        params = copy(sampling_params)
        params.output_kind = RequestOutputKind.FINAL_ONLY  # otherwise vLLM also passes on each step's tokens
        own_agent = not isinstance(self.executor, StrictRewardExecutor)
        if not own_agent and not params.stop:
            params.detokenize = False  # upstream decodes the response itself; an agent may read vLLM's text
        if key is not None:
            length, asked = len(prompt_token_ids), _asked.get()
            words = [*key, length, asked[length]] if asked[length] else [*key, length]
            params.seed = int(np.random.SeedSequence(words).generate_state(1)[0])  # far apart for near keys
            asked[length] += 1
        # For training: features' parameters, and values held until the end.
        answers, held = _answers.get(), False
        if answers is not None:
            if self._holds and not own_agent and params.logprobs is not None:
                params.logprobs = 0  # only the sampled token's is read
            for feature in self.features:
                feature.on_request(params)
            held = self._holds and hold(params)
        with others_work():
            output = await super().generate(prompt_token_ids, params, multi_modal_data)
        if held and params.logprobs is not None:
            for answer in output.outputs:
                answer.logprobs = None
                if own_agent:
                    give_log_probs(answer, params.logprobs)
        if answers is not None:
            answers.append((list(prompt_token_ids), output))
        return output

    async def join_weight_group(self, *args: Any) -> list[None]:
        """See ``WeightReceiver.join_weight_group``; one result per worker, as below."""
        return await self.llm.collective_rpc("join_weight_group", args=args)

    async def receive_weights(self, buckets: list[Bucket], sync_checksum: bool, version: int) -> list[Receipt | None]:
        """See ``WeightReceiver.receive_weights``."""
        receipts = await self.llm.collective_rpc("receive_weights", args=(buckets, sync_checksum, version))
        await self._forget_prefixes()
        self._has_old_weights = False
        return receipts

    async def receive_bucket(
        self, bucket: Bucket, handles: dict[str, bytes], index: int, count: int, sync_checksum: bool, version: int
    ) -> list[Receipt | None]:
        """See ``WeightReceiver.receive_bucket``."""
        arguments = (bucket, handles, index, count, sync_checksum, version)
        receipts = await self.llm.collective_rpc("receive_bucket", args=arguments)
        if index + 1 == count:
            await self._forget_prefixes()
            self._has_old_weights = False
        return receipts

    async def pause_generation(self) -> None:
        """Pause between two tokens until :meth:`resume_generation`. The responses' keys and values are
        then computed again with the new weights."""
        await self.llm.pause_generation(mode="keep", clear_cache=True)

    async def take_peak_memory(self, phase: str) -> list[dict[str, int]]:
        """See ``ReportsPeakMemory``."""
        return await self.llm.collective_rpc("take_peak_memory", args=(phase,))

    async def _forget_prefixes(self) -> None:
        """Drop keys and values of older weights, so that later prompts do not reuse them.

        Paused requests have lost theirs at the pause (vllm 0.29.0, v1/engine/core.py, ``_finish_pause``).
        """
        if self.kwargs["enable_prefix_caching"]:
            dropped = await self.llm.reset_prefix_cache()
            assert dropped, "vLLM kept prefixes of the old weights"


async def _all_or_none(*calls: Awaitable[Any]) -> list[Any]:
    """Like ``asyncio.gather``, but cancel the rest if one raises: vLLM would sample for nobody, and during a
    transfer."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _fail_calls_at_death(core: Any) -> None:
    """Once vLLM's process has died, make calls that wait for its answer raise; vLLM lets them wait forever. Can go
    with a release that has https://github.com/vllm-project/vllm/pull/56416.

    Args:
        core: vLLM's client of the process (vllm 0.29.0, v1/engine/core_client.py, AsyncMPClient).
    """
    while not core.resources.engine_dead:
        await asyncio.sleep(_LOOK_EVERY)
    for answer in core.utility_results.values():
        if not answer.done():
            answer.set_exception(EngineDeadError())


# Concurrent calls of one actor. With Ray's default of 1000, a sign of life would wait behind prompts.
MAX_CALLS = 100_000
