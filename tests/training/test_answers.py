"""Which requests are held, and what the rollout actor makes of their arrays."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openrlhf.utils.agent import AgentExecutorBase
from vllm import SamplingParams
from vllm.logprobs import FlatLogprobs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

from openrlhf_gtpo.training.rollout.answers import columns, give_log_probs, hold, is_held, values_of
from openrlhf_gtpo.training.rollout.rewards import Patience, StrictRewardExecutor
from openrlhf_gtpo.training.rows import Row
from tests.support.fake_engines import Engine
from tests.support.fake_engines import respond as ask

SAMPLED, LOG_PROBS = [5, 6, 5], [-0.5, -0.25, -1.0]


@pytest.mark.parametrize(
    ("given", "held"),
    [
        ({}, True),
        ({"logprobs": 3, "n": 2, "extra_args": {"own": 1}}, True),
        ({"stop": ["."]}, False),
        ({"prompt_logprobs": 0}, False),
        ({"logprobs": -1}, False),
        ({"logprob_token_ids": [3]}, False),
        *[({name: [[3]]}, False) for name in ("prompt_logprob_token_ids",) if hasattr(SamplingParams(), name)],
    ],
    ids=str,
)
def test_a_request_is_held_if_nobody_reads_it_before_its_end(given: dict[str, Any], held: bool) -> None:
    params = SamplingParams(**given)
    assert (hold(params), is_held(params)) == (held, held)
    assert (params.extra_args or {}).get("own") == given.get("extra_args", {}).get("own")


def step_values(top: int) -> LogprobsLists:
    draw = np.random.default_rng(top)
    tokens = draw.integers(0, 99, (len(SAMPLED), top + 1), dtype=np.int32)
    log_probs = -draw.random(tokens.shape, np.float32)
    tokens[:, 0], log_probs[:, 0] = SAMPLED, LOG_PROBS
    return LogprobsLists(tokens, log_probs, draw.integers(1, 1 << 62, len(SAMPLED)))


def sent(top: int) -> SimpleNamespace:
    """An answer with :func:`step_values` as a held request's arrive."""
    tokens, log_probs, ranks, _ = step_values(top)
    rows = np.empty(len(tokens), columns(top))
    rows["rank"], rows["log_prob"] = ranks, log_probs[:, 0]
    if top:
        rows["top_log_probs"], rows["top_tokens"] = log_probs[:, 1:], tokens[:, 1:]
    array = np.frombuffer(rows.tobytes(), np.uint8).reshape(len(tokens), -1)
    return SimpleNamespace(token_ids=SAMPLED, logprobs=[], routed_experts=array, cumulative_logprob=0.0)


@pytest.mark.parametrize("top", [0, 1, 4])
def test_an_agent_finds_what_vllms_client_would_have_made(top: int) -> None:
    wanted = LogprobsProcessor(None, FlatLogprobs(), None, 0.0, top, None)
    wanted._update_sample_logprobs(step_values(top))
    answer: Any = sent(top)
    give_log_probs(answer, top)
    assert answer.logprobs == wanted.logprobs and answer.cumulative_logprob == wanted.cumulative_logprob


def test_an_answer_that_was_not_held_has_the_same_array() -> None:
    held: Any = sent(0)
    array = values_of(held)
    give_log_probs(held, 0)
    held.routed_experts = None
    assert values_of(held).tolist() == array.tolist() and len(array) == len(SAMPLED)
    for nothing in (None, [], [{5: None}]):
        held.logprobs = nothing
        assert len(values_of(held)) == 0


class Agent(AgentExecutorBase):
    """Asks once, and reads log-probs as OpenRLHF's agents do."""

    async def execute(self, prompt: str, label: str, sampling_params: Any, *args: Any, **kwargs: Any) -> Any:
        [answer] = (await kwargs["llm_engine"].generate([1, 2], sampling_params)).outputs
        log_probs = [said[token].logprob for said, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        tokens = {"observation_tokens": [1, 2, *answer.token_ids], "action_ranges": [(2, 2 + len(SAMPLED))]}
        of_prompt = {"prompt": prompt, "label": label, "rollout_log_probs": [0.0, 0.0, *log_probs]}
        return tokens | of_prompt | {"reward": 1.0, "scores": 1.0}


class HoldingEngine(Engine):
    """Answers a held request with its array, and any other as vLLM does."""

    def __init__(self, executor: Any, holds: bool = True) -> None:
        super().__init__()
        self.executor, self._holds = executor, holds
        self.asked: list[SamplingParams] = []

    async def answer(self, prompt: Any, params: Any, request_id: str) -> Any:
        self.asked.append(params)
        answer = sent(params.logprobs or 0)
        answer.finish_reason, answer.text = "stop", ""
        if not is_held(params):
            give_log_probs(answer, params.logprobs or 0)
            answer.routed_experts = None
        if params.logprobs is None:
            answer.logprobs = answer.routed_experts = None
        yield SimpleNamespace(outputs=[answer])


def tokenizer(**given: Any) -> dict[str, Any]:
    return {"input_ids": [np.array([1, 2])]}


def row_of(engine: Engine, logprobs: int | None, is_trained: bool = True) -> Row:
    params = SamplingParams(logprobs=logprobs, max_tokens=8)

    class Tokenizer:
        def __await__(self) -> Any:
            return tokenizer
            yield

    [row] = asyncio.run(ask(engine, params, tokenizer=Tokenizer(), is_trained=is_trained))
    return row


@pytest.mark.parametrize(
    ("executor", "asked", "top"),
    [
        (Agent(), 2, 2),
        (StrictRewardExecutor(None, Patience()), 1, 0),
        (StrictRewardExecutor(None, Patience()), None, None),
    ],
    ids=["agent", "reward", "reward, no values"],
)
def test_a_row_has_the_same_log_probs_held_or_not(executor: Any, asked: int | None, top: int | None) -> None:
    """An agent finds them where vLLM's are, and as many as it asks for; other rows have them from the array."""
    for holds in (True, False):
        engine = HoldingEngine(executor, holds)
        row = row_of(engine, asked)
        assert [(is_held(params), params.logprobs) for params in engine.asked] == [(holds, top if holds else asked)]
        assert row.tokens.tolist() == [1, 2, *SAMPLED]
        if asked is None:
            assert row.log_probs is None
        else:
            assert row.log_probs is not None and row.log_probs.dtype == np.float32
            assert row.log_probs.tolist() == [0, 0, *LOG_PROBS]


def test_evaluations_and_calls_from_elsewhere_are_not_held() -> None:
    engine = HoldingEngine(StrictRewardExecutor(None, Patience()))
    assert row_of(engine, 1, is_trained=False).log_probs is not None
    asyncio.run(engine.generate([1, 2], SamplingParams()))
    assert not any(map(is_held, engine.asked))
