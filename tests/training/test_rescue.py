"""Prompts at which the policy had no right response are queued, answered by the guide, and trained on once."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from fake_engines import RESCUE, answers, fours, guided, sleeping
from openrlhf.trainer.ppo_utils.experience import Experience
from rollouts import arguments, in_sampling_order, maker, rollout

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.controller import trainer
from openrlhf_gtpo.training.controller.trainer import EntropyTrainer
from openrlhf_gtpo.training.credit import experience_maker
from openrlhf_gtpo.training.credit.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.training.credit.guide_rows import guide_rows
from openrlhf_gtpo.training.rollout import samples_generator
from openrlhf_gtpo.training.rollout.rescue import RescueQueue


def failure(prompt: str, number: int = 0) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "label": {"answer": 7},
        "observation_tokens": [1, 2],
        "action_ranges": [(1, 2)],
        "rollout_log_probs": [0.0, -0.5],
        "reward": torch.tensor(0.0),
        "scores": 0,
        "truncated": False,
        "extra_logs": {"guide": torch.tensor([[3.0]])},
        "prompt_number": number,
        "unread": object(),
    }


# ── The queue ──


def test_an_agent_may_leave_out_what_upstream_lets_it() -> None:
    queue = RescueQueue(1)
    queue.add([{name: value for name, value in failure("a").items() if name not in ("truncated", "extra_logs")}])
    [[response]] = queue.take()
    assert response["truncated"] is False and response["extra_logs"] == {}


def test_an_agents_tokens_may_be_arrays() -> None:
    """Upstream takes them, and a checkpoint of the queue does too."""
    queue, again = RescueQueue(1), RescueQueue(1)
    arrays = {"observation_tokens": np.array([1, 2]), "action_ranges": [(np.int64(1), np.int64(2))]}
    queue.add([failure("a") | arrays | {"rollout_log_probs": [np.float32(0.0), np.float32(-0.5)]}])
    again.restore(queue.state())
    [[response]] = again.take()
    for name in ("observation_tokens", "action_ranges", "rollout_log_probs"):
        assert response[name] == ([[1, 2]] if name == "action_ranges" else failure("a")[name])


def test_the_queue_is_bounded_and_gives_up_the_oldest() -> None:
    queue = RescueQueue(2)
    for number in range(11):
        queue.add([failure(str(number))])
    assert len(queue) == 8 and queue.given_up == 3
    assert [responses[0]["prompt"] for responses in queue.take()] == [*map(str, range(3, 11))]
    for number in range(3):
        assert queue.take() == []
        queue.add([failure(str(number))])
        assert len(queue.take()) == 2 * (number == 1)
    assert len(queue) == 1 and (queue.rescued, queue.given_up) == (0, 3)


def test_a_prompt_waits_once_with_its_last_failures() -> None:
    queue = RescueQueue(2)
    for number, prompt in enumerate("aba"):
        queue.add([failure(prompt, number)])
    assert [responses[0]["prompt_number"] for responses in queue.take()] == [1, 2]


def test_what_waits_is_in_a_checkpoint_that_runs_no_code(tmp_path: Any) -> None:
    queue, again = RescueQueue(3), RescueQueue(3)
    for prompt in ("學", "b" * 5000):
        queue.add([failure(prompt), failure(prompt)])
    queue.rescued, queue.given_up = 5, 6
    torch.save(queue.state(), tmp_path / "states")
    state = torch.load(tmp_path / "states", weights_only=True)
    again.restore(state)
    assert (len(again), again.rescued, again.given_up) == (2, 5, 6) and len(repr(state)) < 300
    for one in (queue, again):
        one.add([failure("c")])
    plain = [[responses | {"action_ranges": [[1, 2]]} for responses in group] for group in queue.take()]
    assert again.take()[:2] == plain[:2]


# ── Rollouts ──


def test_the_guide_answers_what_the_policy_failed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is right only at odd prompts, which are kept; the guide is right at every second even one."""
    generator, engines = guided(monkeypatch, 0.0, *RESCUE)
    answers(engines, fours)
    for step in range(3):
        samples = generator.generate_samples(max_len=64)[0]
        assert [sample.prompts[0] for sample in samples] == [str(8 * step + i) for i in (1, 3, 5, 7) for _ in range(3)]
        assert not any(guide_rows(sample) for sample in samples)
        rows, generator.rescued = generator.rescued, []
        assert [row.prompts[0] for row in rows] == [str(8 * step + i) for i in (0, 4) for _ in range(3)]
        assert [float(row.rewards) for row in rows] == [0, 0, 1] * 2 == [int(row.info["guide"]) for row in rows]
        assert all(guide_rows(row).tolist() == [True] for row in rows), "compared with their own engines"
        marks = [[float(row.info[name]) for row in rows] for name in (names.GUIDE_ROWS, names.RESCUE_ROWS)]
        assert marks == [[0, 0, 1] * 2, [1] * 6]
        assert all(row.rollout_log_probs.tolist() == [[-0.5]] for row in rows)
        assert generator.tokens == 8 * 3 + 4, "one per response: eight groups, and an answer to each of four prompts"
    assert (generator.rescue.rescued, generator.rescue.given_up, len(generator.rescue)) == (6, 6, 0)


def test_rows_of_both_log_alike_whatever_type_the_numbers_have(monkeypatch: pytest.MonkeyPatch) -> None:
    generator, engines = guided(monkeypatch, 0.0, *RESCUE)
    answers(engines, fours)
    for engine in engines:
        engine.executor.is_guide = [1]
    generator.generate_samples(max_len=64)
    assert Experience.concat_experiences(generator.rescued, 0).info["guide"].tolist() == [0, 0, 1] * 2


def test_rows_that_nobody_took_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a filter leaves a step without rows: until they are taken, no further prompts are asked."""
    generator, engines = guided(monkeypatch, 0.0, *RESCUE)
    answers(engines, fours)
    for waiting in (0, 4):
        generator.generate_samples(max_len=64)
        assert [row.prompts[0] for row in generator.rescued[::3]] == ["0", "4"] and len(generator.rescue) == waiting


@pytest.mark.parametrize("of_guide", [1, 2])
def test_a_group_of_both_waits_without_the_guides_rows(of_guide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a whole group again once the guide answers, however few of its rows were the policy's."""
    generator, engines = guided(monkeypatch, of_guide / 3, *RESCUE, "--algo.guide.rescue_batch", "4")
    generator.generate_samples(max_len=64)  # the guide is asked about the four even ones again, in vain
    answers(engines, fours)
    for number in (0, 2, 4, 6):
        generator.rescue.add([failure(str(number), number) | {"label": str(number)}] * (3 - of_guide))
    generator._rescue(max_len=64)
    assert [row.prompts[0] for row in generator.rescued] == ["0"] * 3 + ["4"] * 3
    assert [float(row.rewards) for row in generator.rescued] == ([0.0] * (3 - of_guide) + [1.0] * of_guide) * 2


def test_a_guide_that_dies_at_a_rescue(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Its engines, woken for the rescue alone, sleep again: one may live, on the trainer's GPU."""
    generator, _ = guided(monkeypatch, 0.0, *RESCUE, "--algo.guide.on_failure", "continue")
    called = sleeping(generator._guide, monkeypatch)

    def dead(calls: list[Any]) -> Any:
        for call in calls:
            call.close()
        raise ray.exceptions.ActorDiedError

    monkeypatch.setattr(samples_generator, "ray", SimpleNamespace(get=dead, exceptions=ray.exceptions))
    for _ in range(2):
        assert len(generator.generate_samples(max_len=64)[0]) == 12
    assert generator.rescued == [] and generator.rescue.given_up == 4
    assert called == ["a wake_up", "b wake_up", "a sleep", "b sleep"]
    assert capsys.readouterr().out.count("Warning: the guide died (ActorDiedError at a rescue)") == 1


# ── Training ──


def test_a_rescued_batch_has_its_weight_and_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither in dumps nor in audits nor in the step's metrics, and joins one batch only."""
    batch = rollout()
    flags = ("--algo.advantage.estimator", "gtpo", "--algo.kl.init_coef", "0", "--algo.guide.rescue_weight", "0.25")
    made = maker(EntropyExperienceMaker, arguments(*flags), batch, monkeypatch)
    dumped: list[Any] = []
    made.on_batch, audit = lambda *of: dumped.append(of), made.audit
    alone = made.make_experience_batch(batch.samples())
    metrics, made.rescued = dict(made.metrics), batch.samples()
    clock = count()
    monkeypatch.setattr(experience_maker, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    both = made.make_experience_batch(batch.samples())
    assert set(made.seconds.values()) == {2.0}  # a second of its own and one of the rescued
    assert len(dumped) == 2 and made.audit is audit and made.metrics == metrics and made.rescued == []
    wanted = made.credit.advantages(batch.entropy, batch.mask, batch.outcome, batch.group_ids, None)
    for found, weight in ((both[: len(alone)], 1), (both[len(alone) :], 0.25)):
        shaped = in_sampling_order(found, "advantages", batch.mask.shape[1])
        torch.testing.assert_close(shaped, weight * wanted)
    assert all(label is None for experience in both[len(alone) :] for label in experience.labels)
    assert len(made.make_experience_batch(batch.samples())) == len(alone)


def test_rescued_rows_are_trained_on_with_the_steps_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and in the same optimizer steps, as only there a weight can count; a rollout's log covers its own rows."""

    def train_step(self: Any, rows: Any, step: int) -> Any:
        taken, self.experience_maker.rescued = self.experience_maker.rescued, []
        experiences = [SimpleNamespace(info={names.RESCUE_ROWS: torch.zeros(2)}), *taken]
        return self._compute_rollout_stats(experiences) | {"rows": [rows, taken]}, step + 1

    monkeypatch.setattr(trainer._UpstreamTrainer, "train_step", train_step)
    monkeypatch.setattr(
        trainer._UpstreamTrainer, "_compute_rollout_stats", lambda self, experiences: {"batches": len(experiences)}
    )
    monkeypatch.setattr(trainer, "step_warnings", lambda *of: {})
    args = arguments("--algo.advantage.estimator", "gtpo", *RESCUE, "--algo.guide.model_name_or_path", "guide")
    controller: Any = object.__new__(type("Controller", (EntropyTrainer,), {}))
    rescued = SimpleNamespace(info={names.RESCUE_ROWS: torch.ones(2)})
    counted: list[Any] = []
    vars(controller).update(
        args=args,
        guide=SimpleNamespace(step=0),
        samples_generator=SimpleNamespace(rescued=[rescued], rescue=RescueQueue(2), dropped=0, tokens=0),
        experience_maker=SimpleNamespace(rescued=[], metrics={}, outcome=None, credit=None),
        kl_ctl=SimpleNamespace(value=0.1),
        costs=SimpleNamespace(sampled=counted.append, trained=lambda: None),
        metrics_writer=None,
        heartbeat=None,
        warnings={},
    )
    controller.samples_generator.rescue.rescued = 3
    status, step = controller.train_step(["own"], 4)
    assert status["rows"] == [["own"], [rescued]] and status["batches"] == 1
    assert [status[name] for name in (names.RESCUE_QUEUED, names.RESCUE_RESCUED, names.RESCUE_GIVEN_UP)] == [0, 3, 0]
    assert (step, controller.guide.step, controller.samples_generator.rescued) == (5, 5, [])
    assert controller.train_step(["own"], 5)[0]["rows"] == [["own"], []]
    assert counted == [["own", rescued], ["own"]]
