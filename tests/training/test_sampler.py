"""Rollouts and evaluations: which prompts they draw, in which order rows come, what ``--train.seed`` decides, which
groups and prompts are left out, and what happens when an engine dies."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.actors.strategy import Strategy
from openrlhf_gtpo.training.rollout import sampler as sampler_module
from openrlhf_gtpo.training.rollout.rewards import Patience, RewardFailed
from openrlhf_gtpo.training.rollout.turns import template_variables
from openrlhf_gtpo.training.rows import Row
from tests.support.fake_engines import PROMPTS, Executor, sampling, seeds
from tests.support.rollouts import arguments


def prompts(rows: list[Row]) -> list[str]:
    return [row.prompt for row in rows]


def thrice(labels: str) -> list[str]:
    """The prompts of whole groups."""
    return [label for label in labels for _ in range(3)]


def answering(monkeypatch: pytest.MonkeyPatch, changed: Callable[[str], dict[str, Any]], **options: Any) -> Any:
    """A sampler over an agent that answers as ever, but for what ``changed`` says of a prompt."""

    class Changed(Executor):
        async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
            return await super().execute(**given) | changed(given["prompt"])

    sampler = sampling(monkeypatch, **options)
    for handle in sampler.engines:
        handle.engine.executor = Changed()
    return sampler


# ── Prompts ──


def loader(seed: int, workers: int = 0, shuffle: bool = True) -> Any:
    """A data loader as ``prepare_datasets`` asks for it, in a process whose own generator nobody seeds."""
    torch.seed()
    strategy = Strategy(seed=seed, args=arguments())
    return strategy.setup_dataloader(list(range(PROMPTS)), 1, False, shuffle, None, num_workers=workers)


def epoch(loader: Any) -> list[int]:
    return [int(batch) for batch in loader]


def test_the_seed_decides_the_order_of_prompts() -> None:
    one, same, other = loader(1), loader(1), loader(2)
    first, second = epoch(one), epoch(one)
    assert sorted(first) == sorted(second) == list(range(PROMPTS))
    assert [epoch(same), epoch(same)] == [first, second] and first != second
    assert epoch(other) != first


@pytest.mark.parametrize(("seen", "workers"), [(0, 0), (7, 0), (PROMPTS, 0), (7, 1)])
def test_a_resumed_loader_goes_on_in_the_second_epoch(seen: int, workers: int) -> None:
    undisturbed, stopped = loader(1, workers), loader(1, workers)
    expected = epoch(undisturbed) + epoch(undisturbed) + epoch(undisturbed)
    epoch(stopped)
    rest = iter(stopped)
    for _ in range(seen):
        next(rest)
    resumed = loader(1, workers)
    resumed.load_state_dict(deepcopy(stopped.state_dict()))
    assert epoch(resumed) + epoch(resumed) == expected[PROMPTS + seen :]


def test_evaluation_is_not_shuffled() -> None:
    assert epoch(loader(1, shuffle=False)) == list(range(PROMPTS))


def test_an_agent_is_told_the_variables_of_its_prompts_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a row of its own, else the run's, in training, in evaluation and of a prompt that a checkpoint kept."""

    class Loader(list[Any]):
        dataset = SimpleNamespace(variables={"1": {"tags": [1]}})

    seen: dict[str, Any] = {}

    def changed(prompt: str) -> dict[str, Any]:
        seen[prompt] = dict(template_variables.get())
        return {}

    sampler = answering(monkeypatch, changed)
    sampler.args.data.chat_template_kwargs = '{"enable_thinking": false}'
    sampler._prompts, sampler._held_out = Loader(sampler._prompts), Loader(sampler._held_out[:2])
    for sample in (sampler.sample, lambda: sampler.evaluate(1.0, 1)):
        seen.clear()
        sample()
        assert seen.pop("1") == {"tags": [1]} and {*map(str, seen.values())} == {"{'enable_thinking': False}"}
    assert sampler.request(("1", "1", None), 30).variables == {"tags": [1]}


# ── Rows ──


@pytest.mark.parametrize("engines", [1, 2])
def test_rows_come_in_the_order_of_their_prompts(monkeypatch: pytest.MonkeyPatch, engines: int) -> None:
    sampler = sampling(monkeypatch, engines, deterministic=False)
    for first in (0, 4):
        rollout = sampler.sample()
        assert prompts(rollout.rows) == [str(first + i) for i in range(4) for _ in range(3)] and rollout.prompts == 4
        assert [(row.label, row.number) for row in rollout.rows] == [
            (row.prompt, int(row.prompt)) for row in rollout.rows
        ]
        assert rollout.tokens == 12, "one per response"


def test_an_episode_ends_with_what_is_left_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampling(monkeypatch)
    sampler.args.rollout.batch_size = sampler.args.rollout.vllm_generate_batch_size = 16
    rollouts = [sampler.sample() for _ in range(4)]
    assert [rollout.prompts for rollout in rollouts] == [16, 16, 8, 16]
    assert [rollout.exhausted for rollout in rollouts] == [False, False, True, False]
    assert prompts(rollouts[3].rows) == prompts(rollouts[0].rows)
    assert sampler.drawn == PROMPTS + 16 and rollouts[3].rows[0].number == PROMPTS, "numbers go on"


def test_engines_have_about_as_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampling(monkeypatch, engines=2)
    sampler.sample()
    assert [len(handle.engine.seeds) for handle in sampler.engines] == [12, 12]


# ── Seeds ──


def test_under_full_determinism_every_turn_of_every_row_has_a_seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one, same, other = sampling(monkeypatch), sampling(monkeypatch, engines=2), sampling(monkeypatch, seed=2)
    steps = [seeds(one.sample().rows) for _ in range(2)]
    of_turns = [seed for step in steps for _, *turns in step for seed in turns]
    assert len(set(of_turns)) == len(of_turns) == 2 * 4 * 3 * 2
    # An evaluation in between changes nothing, and the next one is the same except for the weights.
    first = seeds(same.sample().rows)
    evaluations = [seeds(same.evaluate(1.0, samples=2)) for _ in range(2)]
    assert [first, seeds(same.sample().rows)] == steps
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 12
    assert not set(of_turns) & {seed for _, *turns in evaluations[0] for seed in turns}
    assert not set(of_turns) & {seed for _, *turns in seeds(other.sample().rows) for seed in turns}


# ── What the filter drops ──


def test_filtered_prompts_leave_the_same_rows_whatever_comes_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = sampling(monkeypatch, filtered=True)  # drops even labels
    rollout = sampler.sample()
    assert prompts(rollout.rows) == thrice("1357") and rollout.prompts == sampler.drawn == 8
    assert rollout.passed == 50, "percent of the prompts"
    again = sampling(monkeypatch, engines=2, filtered=True, oldest_first=True)
    assert seeds(again.sample().rows) == seeds(rollout.rows)


@pytest.mark.parametrize(
    ("estimator", "rewards", "scores", "passes"),
    [
        ("group_norm", [0.3, 0.3, 0.3], [0.3, 0.3, 0.3], False),  # their mean is in the filter's range
        ("group_norm", [0.7 + 0.2 + 0.1, 1.0, 1.0], None, False),  # equal as float32
        ("group_norm", [0.3, 0.3, 0.3], [0.0, 1.0, 1.0], False),
        ("group_norm", [0.1, 0.3, 0.3], [0.5, 0.5, 0.5], False),
        ("group_norm", [0.1, 0.3, 0.3], None, True),
        ("gtpo", [0.1, 0.3, 0.3], None, False),  # none succeeds
        ("gtpo", [0.1, 1.0, 0.3], None, True),
        ("forking_tokens", [0.1, 0.3, 0.3], None, True),
    ],
)
def test_a_group_that_does_not_differ_is_replaced(
    estimator: str, rewards: list[float], scores: list[float] | None, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without scores, as of an agent that leaves them out, rewards stand in for them."""
    at: Counter[str] = Counter()

    def changed(prompt: str) -> dict[str, Any]:
        if prompt != "1":
            return {} if scores else {"scores": None}
        at[prompt] += 1
        index = at[prompt] - 1
        return {"reward": rewards[index], "scores": scores and scores[index]}

    sampler = answering(monkeypatch, changed, filtered=True, estimator=estimator)
    sampler.args.algo.dynamic_filtering_range = (0.0, 1.01)
    found = prompts(sampler.sample().rows)
    assert [prompt for prompt in found if prompt != "1"] == thrice("357" + "9" * (not passes))
    assert found.count("1") == 3 * passes
    at.clear()
    assert prompts(sampler.evaluate(1.0, samples=3)) == thrice("012345"), "an evaluation has all"


# ── What fails ──


@pytest.mark.parametrize("filtered", [False, True])
def test_an_engine_that_dies_in_a_rollout_moves_nothing(monkeypatch: pytest.MonkeyPatch, filtered: bool) -> None:
    """Its responses that nobody has taken are lost; their prompts are asked again, under the same numbers, and those
    of the other engine are not."""
    undisturbed = sampling(monkeypatch, engines=2, filtered=filtered)
    expected = undisturbed.sample()
    lost: list[Any] = []

    def recover(error: Exception) -> None:
        assert isinstance(error, ray.exceptions.ActorUnavailableError)
        if not lost:
            lost.append(sampler.engines.pop(0))

    sampler = sampling(monkeypatch, engines=2, recover=recover, filtered=filtered)
    dying, other = sampler.engines
    asked: list[int] = []  # of the other engine
    answer = other.sample.remote

    def dead() -> Any:
        raise ray.exceptions.ActorUnavailableError("it is being started", None)

    def ask(request: Any, *rest: Any) -> Any:
        asked.append(request.number)
        return answer(request, *rest)

    dying.sample.remote, other.sample.remote = lambda *request: partial(dead), ask
    rollout = sampler.sample()
    assert seeds(rollout.rows) == seeds(expected.rows) and rollout.tokens == expected.tokens
    assert lost == [dying] and sorted(asked) == list(range(undisturbed.drawn))
    assert seeds(sampler.sample().rows) == seeds(undisturbed.sample().rows), "nothing is drawn twice"


def test_an_engine_that_dies_as_it_wakes_or_goes_to_sleep_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only engines on GPUs do, so this is shown with calls that note what they were asked."""
    asked: list[tuple[str, int]] = []

    def call(engines: list[Any], method: str) -> None:
        asked.append((method, len(engines)))
        if len(asked) in (1, 4):
            raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(sampler_module, "batch_vllm_engine_call", call)
    monkeypatch.setattr(sampler_module.time, "sleep", lambda seconds: None)
    expected = seeds(sampling(monkeypatch).sample().rows)
    sampler = sampling(monkeypatch, engines=3, recover=lambda error: sampler.engines.pop())
    sampler.args.vllm.enable_sleep = True
    assert seeds(sampler.sample().rows) == expected
    assert sampler.evaluate(1.0, samples=1)
    assert asked == [("wake_up", 3), ("wake_up", 2), ("sleep", 2), ("wake_up", 2), ("wake_up", 1), ("sleep", 1)]


@pytest.mark.parametrize("failure", [RewardFailed, ConnectionError], ids=["reward", "agent"])
@pytest.mark.parametrize("filtered", [False, True])
def test_a_prompt_whose_reward_or_agent_fails_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, filtered: bool, failure: type[Exception]
) -> None:
    sampler = sampling(monkeypatch, filtered=filtered)
    engine = sampler.engines[0].engine
    engine.patience, engine.executor.fails, engine.executor.failure = Patience(tries=2), {"1"}, failure
    rollout = sampler.sample()
    assert prompts(rollout.rows) == thrice("3579" if filtered else "023") and rollout.dropped == 1
    assert rollout.prompts == (10 if filtered else 4) and rollout.passed == (40 if filtered else None)
    following = sampler.sample()
    assert len(following.rows) == 12 and following.dropped == 0


def test_too_many_failed_rewards_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts that are asked together a tenth may fail, or one: in each batch of an evaluation too."""
    sampler = sampling(monkeypatch)
    engine = sampler.engines[0].engine
    engine.patience, engine.executor.fails = Patience(tries=2), {"1", "5"}
    assert prompts(sampler.evaluate(1.0, samples=1)) == list("0234")
    engine.executor.fails = {"1", "2"}
    for sample in (sampler.sample, lambda: sampler.evaluate(1.0, samples=1)):
        with pytest.raises(
            TrainingStopped,
            match="The reward or agent failed for 2 prompts of a rollout.* The last failure: .*no reward for 1$",
        ):
            sample()
