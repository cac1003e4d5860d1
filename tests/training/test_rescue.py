"""Prompts at which the policy had no right response are queued, answered by the guide, and trained on once."""

import dataclasses
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training import step as step_module
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.credit.info import off_policy_rows
from openrlhf_gtpo.training.feature import ControllerFeature, EngineFeature
from openrlhf_gtpo.training.features.guide.rescue import RescueQueue
from openrlhf_gtpo.training.rows import Rollout, Row
from tests.support.fake_engines import RESCUE, answers, fours, guided, sleeping
from tests.support.rollouts import arguments, in_sampling_order, maker, rollout


def failure(prompt: str, number: int = 0) -> Row:
    return Row(
        prompt=prompt,
        label={"answer": 7},
        number=number,
        tokens=np.array([1, 2]),
        mask=np.array([False, True]),
        log_probs=np.array([0.0, -0.5], dtype=np.float32),
        reward=0.0,
        score=0,
        logs={"guide": 3.0},
        values=TokenValues(np.zeros(2), np.zeros(2)),
        metrics={names.GUIDE_ROWS: 0.0},
    )


def prompts(rows: list[Row]) -> list[str]:
    return [row.prompt for row in rows]


# ── The queue ──


def test_the_queue_is_bounded_and_gives_up_the_oldest() -> None:
    queue = RescueQueue(2)
    for number in range(11):
        queue.add([failure(str(number))])
    assert len(queue) == 8 and queue.given_up == 3
    assert [rows[0].prompt for rows in queue.take()] == [*map(str, range(3, 11))]
    for number in range(3):
        assert queue.take() == []
        queue.add([failure(str(number))])
        assert len(queue.take()) == 2 * (number == 1)
    assert len(queue) == 1 and (queue.rescued, queue.given_up) == (0, 3)


def test_a_prompt_waits_once_with_its_last_failures() -> None:
    queue = RescueQueue(2)
    for number, prompt in enumerate("aba"):
        queue.add([failure(prompt, number)])
    assert [rows[0].number for rows in queue.take()] == [1, 2]


def plain(row: Row) -> dict[str, Any]:
    arrays = {name: getattr(row, name) for name in ("tokens", "mask", "log_probs")}
    return vars(row) | {name: (array.dtype, array.tolist()) for name, array in arrays.items()}


def test_what_waits_is_in_a_checkpoint_that_runs_no_code(tmp_path: Any) -> None:
    """And comes back as it was, without what only the step that it failed in reads."""
    queue, again = RescueQueue(3), RescueQueue(3)
    for prompt in ("學", "b" * 5000):
        queue.add([failure(prompt), failure(prompt)])
    queue.rescued, queue.given_up = 5, 6
    torch.save(queue.state(), tmp_path / "states")
    state = torch.load(tmp_path / "states", weights_only=True)
    again.restore(state)
    assert (len(again), again.rescued, again.given_up) == (2, 5, 6) and len(repr(state)) < 300
    taken = []
    for each in (queue, again):
        each.add([failure("c")])
        taken.append([[plain(row) for row in rows] for rows in each.take()])
    wanted = [plain(dataclasses.replace(failure(prompt), values=None, metrics={})) for prompt in ("學", "b" * 5000)]
    assert taken[0] == taken[1] and taken[0][:2] == [[row, row] for row in wanted]


# ── Rollouts ──


class WithValues(EngineFeature):
    """Rows have values of the sampler's, as with --rollout.entropy sampler."""

    def on_row(self, row: Row, response: dict[str, Any], answers: Any) -> None:
        row.values = TokenValues(np.zeros(2), np.zeros(2))


def test_the_guide_answers_what_the_policy_failed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is right only at odd prompts, which are kept; the guide is right at every second even one."""
    sampler, engines = guided(monkeypatch, 0.0, *RESCUE, "--algo.guide.rescue_weight", "0.25")
    sampler.engines[0].engine.features = (WithValues(),)
    answers(engines, fours)
    for step in range(3):
        found = sampler.sample()
        assert prompts(found.rows) == [str(8 * step + i) for i in (1, 3, 5, 7) for _ in range(3)]
        assert all(row.values and row.weight == 1 and not row.off_policy for row in found.rows)
        assert not any(any(row.metrics.values()) for row in found.rows)
        rows = found.others
        assert prompts(rows) == [str(8 * step + i) for i in (0, 4) for _ in range(3)]
        assert [row.reward for row in rows] == [0, 0, 1] * 2 == [row.logs["guide"] for row in rows]
        assert all(row.off_policy and row.weight == 0.25 for row in rows), "compared with their own engines"
        assert all(row.values is None for row in rows), "the policy may have moved since"
        assert all(row.label is None for row in rows), "or it would pass for a row's number in a dump"
        marks = [[row.metrics[name] for row in rows] for name in (names.GUIDE_ROWS, names.RESCUE_ROWS)]
        assert marks == [[0, 0, 1] * 2, [1] * 6]
        assert all(row.log_probs.tolist() == [0.0, -0.5] for row in rows)
        assert found.tokens == 8 * 3 + 4, "one per response: eight groups, and an answer to each of four prompts"
    assert (sampler.queue.rescued, sampler.queue.given_up, len(sampler.queue)) == (6, 6, 0)
    experiences = Experience.concat_experiences([row.experience(64) for row in rows], 0)
    assert experiences.info["guide"].tolist() == [0, 0, 1] * 2
    off_policy = off_policy_rows(experiences)
    assert off_policy is not None and off_policy.all()


def test_prompts_wait_for_a_step_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout of which the filter leaves nothing has no step, and thus none that rescued rows could join."""
    sampler, engines = guided(monkeypatch, 0.0, *RESCUE)
    answers(engines, fours)
    sampler.args.algo.dynamic_filtering_range = (2, 3)
    empty = sampler.sample()
    assert not empty.rows and not empty.others and empty.exhausted
    sampler.args.algo.dynamic_filtering_range = (0.5, 1.5)
    waiting = len(sampler.queue)
    following = sampler.sample()
    assert waiting == 8 and following.rows and following.others and not len(sampler.queue)


@pytest.mark.parametrize("of_guide", [1, 2])
def test_a_group_of_both_waits_without_the_guides_rows(of_guide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a whole group again once the guide answers, however few of its rows were the policy's."""
    sampler, engines = guided(monkeypatch, of_guide / 3, *RESCUE, "--algo.guide.rescue_batch", "5")
    assert sampler.sample().others == [] and len(sampler.queue) == 4
    answers(engines, fours)
    found = sampler.sample()
    assert prompts(found.others) == ["0"] * 3 + ["4"] * 3
    assert [row.reward for row in found.others] == ([0.0] * (3 - of_guide) + [1.0] * of_guide) * 2
    assert [row.logs["guide"] for row in found.others] == [row.reward for row in found.others]


@pytest.mark.parametrize("samples", [2, 8])
def test_what_waits_joins_groups_of_the_size_of_the_run_that_goes_on(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though its failures in the checkpoint are of another size."""
    before, _ = guided(monkeypatch, 1 / 3, *RESCUE, "--algo.guide.rescue_batch", "5")
    before.sample()
    sampler, engines = guided(monkeypatch, 0.0, *RESCUE)
    answers(engines, lambda label: True)
    sampler.queue.restore(before.queue.state())
    sampler.args.rollout.n_samples_per_prompt = samples
    rescued = Rollout([], 1, False)
    sampler._rescue(rescued)
    assert prompts(rescued.others) == [str(number) for number in (0, 2, 4, 6) for _ in range(samples)]
    own = min(samples // 2, 2)
    assert [row.logs["guide"] for row in rescued.others] == ([0.0] * own + [1.0] * (samples - own)) * 4


def test_a_guide_that_dies_at_a_rescue(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its engines, woken for the rescue alone, sleep again: one may live, on the trainer's GPU."""
    sampler, _ = guided(monkeypatch, 0.0, *RESCUE, "--algo.guide.on_failure", "continue")
    called = sleeping(sampler.guide, monkeypatch)

    def dead() -> Any:
        raise ray.exceptions.ActorDiedError

    for handle in sampler.guide.engines:
        handle.sample.remote = lambda *request: partial(dead)
    for _ in range(2):
        found = sampler.sample()
        assert len(found.rows) == 12 and found.others == []
    assert sampler.queue.given_up == 4
    assert called == ["a wake_up", "b wake_up", "a sleep", "b sleep"]
    assert capsys.readouterr().out.count("Warning: the guide died (ActorDiedError at a rescue)") == 1


# ── Training ──


class Notes(ControllerFeature):
    """Counts the batches that a feature is shown."""

    shown = 0

    def on_values(self, batch: Any) -> None:
        self.shown += 1

    def on_batch(self, batch: Any, experiences: Any) -> None:
        self.shown += 1


def test_a_rescued_batch_has_its_weight_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither in dumps nor in audits nor in the step's metrics, but its time counts."""
    batch, notes = rollout(), Notes(SimpleNamespace())
    args = arguments("--algo.advantage.estimator", "gtpo", "--algo.kl.init_coef", "0")
    made = maker(ExperienceMaker, args, batch, monkeypatch, features=(notes,))
    own = made.make(batch.rows())
    metrics, seconds, outcome = dict(made.metrics), dict(made.seconds), made.outcome
    others = made.make([dataclasses.replace(row, weight=0.25) for row in batch.rows()], own=False)
    assert notes.shown == 2 and made.metrics == metrics and made.outcome is outcome
    assert all(made.seconds[phase] > spent for phase, spent in seconds.items())
    wanted = made.credit.advantages(batch.entropy, batch.mask, batch.outcome, batch.group_ids, None)
    for experiences, weight in ((own, 1), (others, 0.25)):
        shaped = in_sampling_order(experiences, "advantages", batch.mask.shape[1])
        torch.testing.assert_close(shaped, weight * wanted)


def test_rescued_rows_are_trained_on_with_the_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and in the same optimizer steps, as only there a weight can count; a rollout's log covers its own rows."""
    run: Any = MagicMock(step=4, features=())
    run.maker.make = lambda rows, own=True: [*rows]
    run.log.describe.return_value = {}
    run.answered.side_effect = [Rollout(["own"], 1, False, others=["rescued"]), Rollout(["own"], 1, False)]
    dealt: list[Any] = []
    monkeypatch.setattr(step_module, "deal", lambda run, experiences: dealt.append(experiences))
    monkeypatch.setattr(step_module, "train", lambda run, step: {})
    step_module.run_step(run)
    step_module.run_step(run)
    described = [call.args[2] for call in run.log.describe.call_args_list]
    assert dealt == [["own", "rescued"], ["own"]] and described == [["own"]] * 2 and run.step == 6
