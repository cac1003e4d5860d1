"""Groups that a guide answers in part: which rows are whose, how the guide's share anneals, and what happens when the
guide dies."""

import math
from functools import partial
from typing import Any

import pytest
import ray

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.credit.info import off_policy_rows
from openrlhf_gtpo.training.features.guide.guide import Guide
from openrlhf_gtpo.training.rollout.rewards import Patience, RewardFailed
from openrlhf_gtpo.training.rows import Row
from tests.support.fake_engines import Executor, PolicyExecutor, guide_arguments, guided, sampling, seeds, sleeping


def marks(rows: list[Row]) -> list[float]:
    return [row.metrics[names.GUIDE_ROWS] for row in rows]


# ── How many rows ──


@pytest.mark.parametrize(("fraction", "samples"), [(0.25, 8), (0.3, 10), (0.1, 4), (2 / 3, 3), (7 / 8, 8)])
def test_the_guides_part_anneals_linearly(fraction: float, samples: int) -> None:
    """Over each step's prompts it has that share of the rows, to within one row; no two groups differ by more than one
    of its rows, and after the last step of annealing it has none."""
    guide = Guide(["engine"], guide_arguments(fraction, "--algo.guide.steps", "10", samples=samples))
    number = 0
    for step in range(12):
        guide.step = step
        counts = [part[1] if part else 0 for part in map(guide.rows_of, range(number, number + 64))]
        number += 64
        part = fraction * max(0.0, 1 - step / 10)
        assert abs(sum(counts) - part * samples * 64) < 1 + 1e-3
        assert max(counts) - min(counts) <= 1 and max(counts) < samples
        assert step < 10 or sum(counts) == 0


def test_a_whole_number_of_rows_is_in_every_group_and_never_anneals_without_steps() -> None:
    guide = Guide(["a", "b"], guide_arguments(0.3, samples=10))
    guide.step = 10**6
    found = [guide.rows_of(number) for number in range(2000)]
    assert found == [("a", 3), ("b", 3)] * 1000


@pytest.mark.parametrize(("fraction", "engines"), [(0.05, 2), (0.15, 2), (0.25, 3), (0.3, 3), (0.55, 4)])
def test_its_engines_have_about_as_many_rows_each(fraction: float, engines: int) -> None:
    guide = Guide([*range(engines)], guide_arguments(fraction, samples=10))
    given = [0] * engines
    for number in range(200):
        engine, count = guide.rows_of(number) or (0, 0)
        if count:
            given[engine] += count
            assert max(given) - min(given) <= math.ceil(fraction * 10)


# ── Groups ──


def test_a_group_is_the_policys_rows_and_then_the_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own seed, the policy's rows those of a run without a guide; evaluation is only the policy's."""
    alone = seeds(sampling(monkeypatch).sample().rows)
    sampler, _ = guided(monkeypatch)
    rows = sampler.sample().rows
    assert marks(rows) == [float(row.off_policy) for row in rows] == [row.logs["guide"] for row in rows]
    assert marks(rows) == [0.0, 0.0, 1.0] * 4 == [float(off_policy_rows(row.experience(64))) for row in rows]
    assert [row.prompt for row in rows] == [str(i) for i in range(4) for _ in range(3)]
    assert all(row.log_probs.tolist() == [0.0, -0.5] for row in rows)
    found = seeds(rows)
    assert [row for i, row in enumerate(found) if i % 3 < 2] == [row for i, row in enumerate(alone) if i % 3 < 2]
    of_turns = [seed for _, *turns in found for seed in turns]
    assert len(set(of_turns)) == len(of_turns)
    for handle in sampler.engines:
        handle.engine.executor = Executor()  # which is asked for no log-probs
    assert not any(row.off_policy or row.metrics for row in sampler.evaluate(1.0, samples=2))


def test_a_filter_sees_all_rows_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in which only the guide's responses are right are kept."""

    class Fails(PolicyExecutor):
        async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
            return await super().execute(**given) | {"reward": 0.0, "scores": 0.0}

    sampler, _ = guided(monkeypatch)
    sampler.args.algo.dynamic_filtering_enable = True
    sampler.args.algo.dynamic_filtering_range = (0.0, 1.0)
    for handle in sampler.engines:
        handle.engine.executor = Fails()
    rows = sampler.sample().rows
    assert [row.prompt for row in rows] == [p for p in "1357" for _ in range(3)]  # the guide's right ones
    assert marks(rows) == [0.0, 0.0, 1.0] * 4
    assert [row.reward > 0 for row in rows] == [False, False, True] * 4


# ── What fails ──


def test_a_prompt_whose_reward_fails_at_the_guide_is_dropped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, engines = guided(monkeypatch)
    for engine in engines:
        engine.executor.fails, engine.executor.failure, engine.patience = {"2"}, RewardFailed, Patience(tries=3)
    rollout = sampler.sample()
    assert [row.prompt for row in rollout.rows] == [p for p in "013" for _ in range(3)]
    assert rollout.dropped == 1


@pytest.mark.parametrize("death", [ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("low on memory")])
def test_a_guide_that_dies_is_replaced_by_the_policy_or_stops_the_run(
    death: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The policy answers in its place in the rollout in which it died, as in a run without it; it is not asked again,
    which is said once."""
    alone = seeds(sampling(monkeypatch).sample().rows)
    for on_failure in ("continue", "stop"):
        sampler, engines = guided(monkeypatch, 1 / 3, "--algo.guide.on_failure", on_failure)

        def dead() -> Any:
            raise death

        for handle in sampler.guide.engines[1:]:
            handle.sample.remote = lambda *request: partial(dead)
        if on_failure == "stop":
            with pytest.raises(TrainingStopped, match="engine of the guide died .* --algo.guide.on_failure continue"):
                sampler.sample()
            continue
        rows = sampler.sample().rows
        # Engines take turns.
        assert marks(rows) == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 2
        assert [row for row, mark in zip(seeds(rows), marks(rows)) if not mark] == [
            row for row, mark in zip(alone, marks(rows)) if not mark
        ]
        assert marks(sampler.sample().rows) == [0.0] * 12
        assert capsys.readouterr().out.count("Warning: the guide died") == 1


def test_it_sleeps_but_while_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes once around all that samples in turn; if one engine dies, the run goes on and the others sleep."""
    sampler, _ = guided(monkeypatch, 0.5, "--algo.guide.steps", "2", "--algo.guide.on_failure", "continue")
    guide = sampler.guide
    called = sleeping(guide, monkeypatch)
    for guide.step in (0, 1, 2):
        sampler.sample()
    assert called == ["a wake_up", "b wake_up", "a sleep", "b sleep"] * 2
    called.clear()
    with guide.awake(), guide.awake():
        called.append("sampling")
    assert called == ["a wake_up", "b wake_up", "sampling", "a sleep", "b sleep"]
    called.clear()
    guide.engines[0].wake_up.dies = guide.engines[0].sleep.dies = True
    guide.step = 0
    with guide.awake():
        assert guide.rows_of(0) is None
    assert called == ["b wake_up", "b sleep"]
