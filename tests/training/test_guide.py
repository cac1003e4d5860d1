"""Groups that a guide answers in part: which rows are whose, how the guide's share anneals, and what happens when the
guide dies."""

import math
from typing import Any

import pytest
import ray
from fake_engines import (
    RESCUE,
    Executor,
    GuideExecutor,
    PolicyExecutor,
    guide_arguments,
    guided,
    rows,
    sampling,
    sleeping,
)

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.rollout.guide import Guide
from openrlhf_gtpo.training.rollout.rewards import Patience, RewardFailed
from openrlhf_gtpo.training.rollout.samples_generator import SharedTokenizer


def marks(samples: list[Any]) -> list[float]:
    return [float(sample.info[names.GUIDE_ROWS]) for sample in samples]


class Ref:
    """Ray's reference to a tokenizer, which counts how often it is fetched."""

    fetched = 0

    def __await__(self) -> Any:
        self.fetched += 1
        yield
        return "a tokenizer"


# ── How many rows ──


@pytest.mark.parametrize(("fraction", "samples"), [(0.25, 8), (0.3, 10), (0.1, 4), (2 / 3, 3), (7 / 8, 8)])
def test_the_guides_part_anneals_linearly(fraction: float, samples: int) -> None:
    """Over each step's prompts it has that share of the rows, to within one row; no two groups differ by more than one
    of its rows, and after the last step of annealing it has none."""
    guide = Guide(["engine"], guide_arguments(fraction, "--algo.guide.steps", "10", samples=samples))
    number = 0
    for step in range(12):
        guide.step = step
        counts = [rows.num_rows if rows else 0 for rows in map(guide.rows_of, range(number, number + 64))]
        number += 64
        part = fraction * max(0.0, 1 - step / 10)
        assert abs(sum(counts) - part * samples * 64) < 1 + 1e-3
        assert max(counts) - min(counts) <= 1 and max(counts) < samples
        assert step < 10 or sum(counts) == 0


def test_a_whole_number_of_rows_is_in_every_group_and_never_anneals_without_steps() -> None:
    guide = Guide(["a", "b"], guide_arguments(0.3, samples=10))
    guide.step = 10**6
    found = [guide.rows_of(number) for number in range(2000)]
    assert all(rows is not None and rows.num_rows == 3 for rows in found)
    assert [rows.engine for rows in found[:3] if rows] == ["a", "b", "a"]


@pytest.mark.parametrize(("fraction", "engines"), [(0.05, 2), (0.15, 2), (0.25, 3), (0.3, 3), (0.55, 4)])
def test_its_engines_have_about_as_many_rows_each(fraction: float, engines: int) -> None:
    guide = Guide([*range(engines)], guide_arguments(fraction, samples=10))
    given = [0] * engines
    for number in range(200):
        rows = guide.rows_of(number)
        if rows:
            given[rows.engine] += rows.num_rows
            assert max(given) - min(given) <= math.ceil(fraction * 10)


# ── Groups ──


def test_a_group_is_the_policys_rows_and_then_the_guides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has its own seed, the policy's rows those of a run without a guide; evaluation is only the policy's."""
    alone = rows(sampling(monkeypatch).generate_samples()[0])
    generator, engines = guided(monkeypatch)
    generator.tokenizer, seen = SharedTokenizer(Ref()), []
    for engine in engines:
        answer = engine.executor.execute
        engine.executor.execute = lambda answer=answer, **of: seen.append(of["hf_tokenizer"]) or answer(**of)
    samples = generator.generate_samples()[0]
    assert set(seen) == {"a tokenizer"} and generator.tokenizer.ref.fetched == 3, "once for each engine"
    assert marks(samples) == [float(sample.info["guide"]) for sample in samples] == [0.0, 0.0, 1.0] * 4
    assert [sample.prompts[0] for sample in samples] == [str(i) for i in range(4) for _ in range(3)]
    assert all(sample.rollout_log_probs.tolist() == [[-0.5]] for sample in samples)
    found = rows(samples)
    assert [row for i, row in enumerate(found) if i % 3 < 2] == [row for i, row in enumerate(alone) if i % 3 < 2]
    seeds = [seed for _, *turns in found for seed in turns]
    assert len(set(seeds)) == len(seeds)
    for handle in generator.vllm_engines:
        handle.engine.executor = Executor()  # which is asked for no log-probs
    assert marks(generator.generate_eval_samples(n_samples_per_prompt=2)) == [0.0] * 12


def test_a_filter_sees_all_rows_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups in which only the guide's responses are right are kept."""

    class Fails(PolicyExecutor):
        async def execute(self, **given: Any) -> dict[str, Any]:  # type: ignore[override]
            return await super().execute(**given) | {"reward": 0.0, "scores": 0.0}

    generator, _ = guided(monkeypatch)
    generator.args.algo.dynamic_filtering_enable = True
    generator.args.algo.dynamic_filtering_range = (0.0, 1.0)
    for handle in generator.vllm_engines:
        handle.engine.executor = Fails()
    samples = generator.generate_samples()[0]
    assert [sample.prompts[0] for sample in samples] == [p for p in "1357" for _ in range(3)]  # the guide's right ones
    assert marks(samples) == [0.0, 0.0, 1.0] * 4
    assert [float(sample.rewards) > 0 for sample in samples] == [False, False, True] * 4


def test_where_entropies_come_from_samplers_a_guide_row_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, _ = guided(monkeypatch, fraction=2 / 3)
    generator.args.rollout.entropy = "sampler"
    for sample in generator.generate_samples()[0]:
        if sample.info[names.GUIDE_ROWS]:
            assert all(values[sample.action_mask.bool()].isnan().all() for values in sample.sampler_values)


# ── What fails ──


@pytest.mark.parametrize(("log_probs", "got"), [(None, "none"), ([0.0, float("nan")], "others")])
def test_an_answer_without_log_probs_stops_the_run(log_probs: Any, got: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, engines = guided(monkeypatch)
    for engine in engines:
        engine.executor.log_probs = log_probs
    with pytest.raises(TrainingStopped, match=f"finite log-prob from the engine .* got a response with {got}"):
        generator.generate_samples()


def test_an_agent_without_log_probs_stops_the_run_at_the_policys_rows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rescue would compare these rows with their engine, by its log-probs; an evaluation needs none."""
    generator, _ = guided(monkeypatch, 0.0, *RESCUE)
    for handle in generator.vllm_engines:
        handle.engine.executor = Executor()
    assert len(generator.generate_eval_samples(n_samples_per_prompt=2)) == 12
    with pytest.raises(TrainingStopped, match="finite log-prob from the engine .* got a response with none"):
        generator.generate_samples()


def test_a_prompt_whose_reward_fails_at_the_guide_is_dropped_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuideExecutor, "failure", RewardFailed)
    monkeypatch.setattr("openrlhf_gtpo.training.rollout.samples_generator._MAY_DROP", 0.5)
    generator, engines = guided(monkeypatch)
    for engine in engines:
        engine.executor.fails, engine.patience = {"2"}, Patience(tries=3)
    samples = generator.generate_samples()[0]
    assert [sample.prompts[0] for sample in samples] == [p for p in "013" for _ in range(3)]
    assert generator.dropped == 1


@pytest.mark.parametrize("death", [ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("low on memory")])
def test_a_guide_that_dies_is_replaced_by_the_policy_or_stops_the_run(
    death: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The policy answers in its place in the rollout in which it died; it is not asked again, which is said once."""
    for on_failure in ("continue", "stop"):
        generator, engines = guided(monkeypatch, 1 / 3, "--algo.guide.on_failure", on_failure)

        async def dead(*args: Any, **kwargs: Any) -> Any:
            raise death

        handles = generator._guide.engines
        handles[1].generate_responses.remote = dead
        if on_failure == "stop":
            with pytest.raises(TrainingStopped, match="engine of the guide died .* --algo.guide.on_failure continue"):
                generator.generate_samples()
            continue
        samples = generator.generate_samples()[0]
        # Engines take turns, and the last prompt comes back first.
        assert marks(samples) == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0] * 2
        handles[0].generate_responses.remote = dead
        assert marks(generator.generate_samples()[0]) == [0.0] * 12
        assert capsys.readouterr().out.count("Warning: the guide died") == 1


@pytest.mark.parametrize(("endpoint", "logs"), [(None, "its node's Ray logs"), ("http://a/v1", "its server's logs")])
def test_a_guide_that_dies_says_where_to_look(endpoint: str | None, logs: str) -> None:
    guide = Guide(["engine"], guide_arguments(0.5))
    guide._args.algo.guide.endpoint = endpoint
    with pytest.raises(TrainingStopped, match=rf"the guide died \(no answer\); {logs} say more\."):
        guide.died("no answer")


def test_it_sleeps_but_while_it_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes once around all that samples in turn; if one engine dies, the run goes on and the others sleep."""
    generator, engines = guided(monkeypatch, 0.5, "--algo.guide.steps", "2", "--algo.guide.on_failure", "continue")
    guide = generator._guide
    called = sleeping(guide, monkeypatch)
    for guide.step in (0, 1, 2):
        generator.generate_samples()
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
