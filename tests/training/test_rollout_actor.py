"""What an engine's actor makes of a request: its rows, their seeds, what is dropped and what stops the run, and how
the engine is started."""

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor
from vllm import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.rollout import rollout_actor
from openrlhf_gtpo.training.rollout.rewards import Patience
from openrlhf_gtpo.training.rollout.rollout_actor import EngineRestarted, StrictRolloutActor
from openrlhf_gtpo.training.rows import Dropped, Row
from tests.support.fake_engines import VOCABULARY, Engine, Executor, respond


class Answers(Executor):
    """The agent's answer but for ``changed``."""

    def __init__(self, **changed: Any) -> None:
        super().__init__()
        self.changed = changed

    async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
        return await super().execute(**given) | self.changed


def row_of(max_len: int = 64, **changed: Any) -> Row:
    engine = Engine()
    engine.executor = Answers(**changed)
    [row] = asyncio.run(respond(engine, max_len=max_len))
    return row


# ── Requests ──


def test_an_agent_that_asks_once_more_gets_another_answer() -> None:
    """It may ask with the same tokens, to take the best of several; the same sample gets the same answers again."""

    class Twice(Executor):
        async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
            asked = [await given["llm_engine"].generate([5, 6], given["sampling_params"]) for _ in range(2)]
            return await super().execute(**given) | {"extra_logs": dict(zip("ab", asked))}

    engine = Engine()
    engine.executor = Twice()
    first, other, same = (
        asyncio.run(respond(engine, seed=(1, 2), first=place))[0].logs.values() for place in (0, 1, 0)
    )
    assert len({*first, *other}) == 4 and [*first] == [*same]


def test_samples_of_a_prompt_do_not_share_their_sampling_parameters() -> None:
    """Upstream's agent takes what is left for the first turn of another sample for the least of its own, and would
    cut the observation that this one begins with."""

    class Growing(AgentInstanceBase):
        made = 0

        def __init__(self) -> None:
            Growing.made += 1
            self.number = Growing.made

        async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
            return {"observation": "x" * 5 * self.number}

        async def step(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
            states["sampling_params"].temperature = self.number / 10
            done = len(states["observation_text"]) > 5 * self.number
            return {"rewards": torch.tensor(1.0), "environment_feedback": "f", "done": done}

    engine, asked = Engine(), []
    engine.executor = MultiTurnAgentExecutor(Growing)

    async def answer(prompt: Any, params: Any, request_id: str) -> Any:
        asked.append((len(prompt["prompt_token_ids"]), params.max_tokens, params.temperature))
        await asyncio.sleep(0)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="stop", text="a")])

    async def tokenizer() -> Any:
        return lambda text, **_: {"input_ids": torch.ones(1, len(text), dtype=torch.long)}

    async def lengths() -> list[int]:
        params = SamplingParams(max_tokens=None)
        return [len(row.tokens) for row in await respond(engine, params, 3, 30, tokenizer())]

    engine.llm.generate = answer
    assert asyncio.run(lengths()) == [9, 14, 19]
    assert sorted(asked) == [(5, 25, 1), (7, 23, 0.1), (10, 20, 1), (12, 18, 0.2), (15, 15, 1), (17, 13, 0.3)]


def test_a_call_that_is_cancelled_leaves_the_tokenizer_to_the_others() -> None:
    engine = Engine()

    async def story() -> Any:
        coming: Any = asyncio.get_running_loop().create_future()
        cancelled, other = (asyncio.ensure_future(respond(engine, tokenizer=coming)) for _ in range(2))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        coming.set_result(None)
        return await other

    assert len(asyncio.run(story())) == 1


# ── Rows ──


@pytest.mark.parametrize(
    ("tokens", "actions", "cut"),
    [(8, [(2, 4), (6, 8)], False), (9, [(2, 4)], True), (8, [(2, 7)], True), (7, [(2, 4)], False), (8, [], True)],
)
def test_an_agent_whose_context_is_full_was_cut_off(tokens: int, actions: list[tuple[int, int]], cut: bool) -> None:
    """A row ends with an action that vLLM did not cut off, or with an observation that leaves no room for the next."""
    row = row_of(max_len=8, observation_tokens=[1] * tokens, action_ranges=actions)
    assert row.truncated is cut and len(row.tokens) == len(row.mask) == min(tokens, 8)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"reward": float("nan")}, "its reward is nan, which is not a finite float32"),
        ({"reward": 1e39}, "its reward is 1e\\+39, which is not a finite float32"),
        ({"scores": float("-inf")}, "its scores is -inf, which is not a finite float32"),
        ({"rollout_log_probs": [-0.5]}, "it has 1 rollout_log_probs for 2 observation_tokens"),
        ({"reward": "good"}, ".*"),
        ({"extra_logs": {"a": ["good"]}}, ".*"),
        ({"observation_tokens": [1, VOCABULARY]}, "token 1000 is not in the model's vocabulary of 1000"),
        ({"observation_tokens": [-1, 1]}, "token -1 is not in the model's vocabulary of 1000"),
    ],
    ids=str,
)
def test_an_agents_response_that_cannot_be_learned_from(changed: dict[str, Any], what: str) -> None:
    """A filter would take NaN for a group that teaches nothing; log-probs that lack a turn's would be padded."""
    with pytest.raises(
        TrainingStopped, match=f"Expected --train.agent_func_path to return .* cannot be read .*Error: {what}"
    ):
        row_of(**changed)


# ── What fails ──


def failing(failure: type[Exception], patience: Patience) -> Engine:
    engine = Engine()
    engine.executor.fails, engine.executor.failure, engine.patience = {"1"}, failure, patience
    return engine


def test_a_dropped_prompt_has_nothing_left_at_the_engine() -> None:
    """vLLM would go on sampling for nobody, into the transfer of weights, after which it could not empty its cache."""
    engine, calls = Engine(), Counter[str]()
    engine.patience = Patience(tries=2, seconds=600)

    async def generate(tokens: Any, params: Any, *_: Any) -> Any:
        calls["asked"] += 1
        first = calls["asked"] in (1, 5)  # the first sample, and its second try
        calls["running"] += 1
        try:
            await asyncio.sleep(0 if first else 6000)
            raise ConnectionError("no reward")
        finally:
            calls["running"] -= 1

    async def story() -> Any:
        answer = await respond(engine, samples=4)
        while calls["running"]:
            await asyncio.sleep(0)
        return answer

    engine.generate = generate
    assert asyncio.run(asyncio.wait_for(story(), 600)) == Dropped("ConnectionError: no reward")


@pytest.mark.parametrize("tries", [1, 2])
def test_a_mistake_drops_nothing_and_an_engine_that_died_neither(tries: int) -> None:
    for failure, raised in ((TrainingStopped, TrainingStopped), (ConnectionError, EngineDeadError)):
        engine = failing(failure, Patience(tries))

        async def dead() -> None:
            raise EngineDeadError

        engine.llm.is_sleeping = dead
        with pytest.raises(raised):
            asyncio.run(respond(engine))


def test_an_engine_that_was_started_again_does_not_sample_before_it_has_the_weights() -> None:
    engine = Engine()
    engine.kwargs = {"enable_prefix_caching": False}
    engine._has_old_weights = True

    async def story() -> None:
        for call in (engine.serves(), respond(engine)):
            with pytest.raises(EngineRestarted):
                await call
        await engine.receive_weights([], True, 1)
        await engine.serves()
        assert len(await respond(engine)) == 1
        engine._has_old_weights = True
        await engine.receive_bucket([], {}, 0, 2, True, 1)
        with pytest.raises(EngineRestarted):
            await engine.serves()
        await engine.receive_bucket([], {}, 1, 2, True, 1)
        await engine.serves()

    asyncio.run(story())


# ── Start ──
def engine_start(monkeypatch: pytest.MonkeyPatch, platform: str) -> dict[str, Any]:
    """A dict that gets the arguments with which upstream's actor is started from now on."""
    started: dict[str, Any] = {}

    async def start(self: Any, *args: Any, **kwargs: Any) -> None:
        started.update(kwargs)
        self.executor, self.llm = None, SimpleNamespace(engine_core=None)

    monkeypatch.setattr(rollout_actor.StrictRolloutActor.__base__, "__init__", start)
    monkeypatch.setenv("OPENRLHF_GTPO_PLATFORM", platform)
    return started


@pytest.mark.parametrize(("platform", "alone"), [("cpu", True), ("cuda", False)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_request_has_the_engine_to_itself_on_a_cpu_under_full_determinism(
    monkeypatch: pytest.MonkeyPatch, platform: str, alone: bool, deterministic: bool
) -> None:
    started = engine_start(monkeypatch, platform)
    actor = object.__new__(StrictRolloutActor)
    actor.engine_args = {"max_num_seqs": 512, "max_num_batched_tokens": 4096}
    asyncio.run(actor.__init__(full_determinism=deterministic, enable_prefix_caching=True))  # type: ignore[misc]
    is_alone = alone and deterministic
    given = {"max_num_seqs": 1, "max_num_batched_tokens": None} if is_alone else actor.engine_args
    assert {name: started[name] for name in given} == given
    assert started["enable_prefix_caching"] is not is_alone


def test_responses_that_are_paused_go_on_and_lose_their_cache() -> None:
    """Keys and values are computed again with the weights that follow."""
    engine, asked = Engine(), []

    async def pause(**how: Any) -> None:
        asked.append(how)

    engine.llm.pause_generation = pause
    asyncio.run(engine.pause_generation())
    assert asked == [{"mode": "keep", "clear_cache": True}]
