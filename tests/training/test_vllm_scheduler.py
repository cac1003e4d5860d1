"""The scheduler beside vLLM's own, over a model that is a table: also as GPUs schedule, a step ahead of the answers,
which vLLM does not do on a CPU. For a real engine, see ``test_held_requests.py``."""

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from vllm import EngineArgs, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from openrlhf_gtpo.training.rollout.answers import columns, hold
from openrlhf_gtpo.training.rollout.vllm_scheduler import make_scheduler
from tests.support.fake_engines import VOCABULARY

BLOCK, REQUESTS, TOKENS = 16, 24, 40
Told = dict[str, tuple[list[int], list[float], list[int], Any]]  # tokens, log-probs, ranks, reason of the end


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import LlamaConfig

    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(vocab_size=VOCABULARY, head_dim=32, architectures=["LlamaForCausalLM"], **shape).save_pretrained(
        folder
    )
    given = EngineArgs(str(folder), skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, block_size=BLOCK)
    given.max_num_batched_tokens, given.enable_prefix_caching = 64, False
    return given.create_engine_config()


def scheduler(config: Any, make: Callable[..., Scheduler], blocks: int) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    config.cache_config.num_gpu_blocks = blocks
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def answers(own: Scheduler, lag: int, held: bool, at_step: dict[int, Callable[[Scheduler], Any]]) -> Told:
    """What the clients are told, by request, if the model's answers come ``lag`` steps late."""
    requests = []
    for number in range(REQUESTS):
        params = SamplingParams(max_tokens=TOKENS, logprobs=number % 3, stop_token_ids=[5])
        params.output_kind = RequestOutputKind.FINAL_ONLY
        if held and number % 5:  # others beside them
            assert hold(params)
        requests.append(Request(str(number), [number + 1] * (7 * number % 90 + 1), params, None))
        own.add_request(requests[-1])
    told: Told = {}
    under_way: deque[Any] = deque()
    step = messages = 0
    while own.requests or under_way:
        at_step.get(step, lambda _: None)(own)
        scheduled = own.schedule()
        ready = [name for name in scheduled.num_scheduled_tokens if not own.requests[name].is_prefill_chunk]
        under_way.append((scheduled, output_of(list(scheduled.num_scheduled_tokens), ready, step)))
        step += 1
        while under_way and (len(under_way) > lag or not own.requests):
            for client in own.update_from_output(*under_way.popleft()).values():
                for output in client.outputs:
                    messages += 1
                    tell(told, output)
    is_tight = own.kv_cache_config.num_blocks < 200
    assert is_tight == any(request.num_preemptions for request in requests)
    if held:
        assert not own.held and messages < REQUESTS * TOKENS / 3
    return told


def output_of(names: list[str], ready: list[str], step: int) -> ModelRunnerOutput:
    """Tokens for the requests that are ``ready``; each row of a step has numbers of its own."""
    draw = np.random.default_rng(step)
    tokens = draw.integers(0, 200, (len(names), 3), dtype=np.int32)
    lists = LogprobsLists(tokens, draw.random((len(names), 3), np.float32), draw.integers(1 << 62, size=len(names)))
    sampled = [[int(tokens[row, 0])] if name in ready else [] for row, name in enumerate(names)]
    return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled, lists)


def tell(told: Told, output: Any) -> None:
    tokens, values, ranks, _ = told.setdefault(output.request_id, ([], [], [], None))
    tokens += output.new_token_ids
    top = int(output.request_id) % 3
    if output.new_logprobs is not None:
        _, log_probs, of_tokens, _ = output.new_logprobs
        values += log_probs[:, : top + 1].ravel().tolist()
        ranks += of_tokens.tolist()
    if output.routed_experts is not None:
        rows = output.routed_experts.view(columns(top))[:, 0]
        own = rows["log_prob"][:, None]
        values += (np.hstack([own, rows["top_log_probs"]]) if top else own).ravel().tolist()
        ranks += rows["rank"].tolist()
    told[output.request_id] = (tokens, values, ranks, output.finish_reason)


def abort(some: Scheduler) -> None:
    some.finish_requests([str(number) for number in range(0, REQUESTS, 3)], RequestStatus.FINISHED_ABORTED)


def recompute(some: Scheduler) -> None:
    """As a change of weights has it: every request loses what it has computed, and what is on its way is dropped."""
    some.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.parametrize("lag", [0, 1], ids=["", "asynchronous"])
@pytest.mark.parametrize(
    ("blocks", "at_step"),
    [(200, {}), (40, {}), (40, {6: abort, 20: abort}), (60, {9: recompute, 30: recompute})],
    ids=["", "preempted", "aborted", "recomputed"],
)
def test_clients_are_told_the_same(
    config: Any, lag: int, blocks: int, at_step: dict[int, Callable[[Scheduler], Any]]
) -> None:
    config.scheduler_config.async_scheduling = bool(lag)
    own = scheduler(config, AsyncScheduler if lag else Scheduler, blocks)
    wanted = answers(own, lag, False, at_step)
    ours = scheduler(config, make_scheduler, blocks)
    assert isinstance(ours, AsyncScheduler if lag else Scheduler)
    found = answers(ours, lag, True, at_step)
    ended = {name: told for name, told in wanted.items() if told[3] is not None}
    assert {name: told for name, told in found.items() if told[3] is not None} == ended
    assert len(ended) == REQUESTS - (REQUESTS // 3 if abort in at_step.values() else 0)
    assert any(len(tokens) < TOKENS for tokens, *_ in ended.values()), "none met its stop token"
