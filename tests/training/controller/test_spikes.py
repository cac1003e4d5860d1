"""A step whose numbers stand out ends the run before being saved, and an adaptive KL coefficient stays a number."""

import json
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.errors import Restartable, TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter
from openrlhf_gtpo.training.controller import trainer
from openrlhf_gtpo.training.controller.spikes import Spikes
from openrlhf_gtpo.training.controller.trainer import EntropyTrainer


def after(steps: int, limit: float = 8.0) -> Spikes:
    """``Spikes`` after ``steps`` steps whose gradient norms are normal with mean 1 and standard deviation 0.1."""
    spikes, generator = Spikes(limit), random.Random(0)
    for step in range(steps):
        spikes.check(step + 1, {"actor_grad_norm": generator.gauss(1.0, 0.1), "kl": 0.01, "policy_loss": None})
    return spikes


@pytest.mark.parametrize(("steps", "window"), [(20, 20), (200, 50)])
def test_a_spike_is_named(steps: int, window: int) -> None:
    spikes = after(steps)
    with pytest.raises(  # (5 - 1) / 0.1 is 40; 20 numbers give the spread to within about a quarter
        Restartable,
        match=rf"^actor_grad_norm of step {steps + 1} is 5, [3-5]\d\.\d robust standard deviations above the "
        rf"(1\.\d+|0\.9\d+) of the {window} steps before it \(--train\.spike_zscore 8\)\. It is not saved\.$",
    ):
        spikes.check(steps + 1, {"actor_grad_norm": 5.0})


def test_what_is_no_spike() -> None:
    after(19).check(20, {"actor_grad_norm": 1e9})  # too few to say
    after(60, limit=0).check(61, {"actor_grad_norm": 1e9})
    spikes = after(60)
    spikes.check(61, {"actor_grad_norm": 0.0})  # a step without a gradient
    spikes.check(62, {"actor_grad_norm": math.nan, "kl": math.inf})  # skipped, which is counted elsewhere
    spikes.check(63, {"kl": 5.0})  # kl has not varied, so nothing says how far is far
    spikes.check(64, {"reward/mean": 1e9})
    spikes.check(65, {"actor_grad_norm": 1e9, names.RESCUE_ROWS: 0.1})  # rescue rows are not like the others
    assert max(spikes.recent["actor_grad_norm"]) < 2
    with pytest.raises(Restartable, match="ppo_kl of step 96 "):
        for step in range(66, 97):
            spikes.check(step, {"ppo_kl": 0.01 * (step % 7) if step < 96 else 9.0, names.RESCUE_ROWS: 0.1})
    assert all(map(math.isfinite, sum(spikes.recent.values(), [])))


def test_a_spike_is_logged_and_neither_saved_nor_forgotten_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumed from the checkpoint before the spike knows the steps before it, and meets it again."""
    controller = object.__new__(EntropyTrainer)
    ckpt = SimpleNamespace(save_steps=1, path=str(tmp_path), stop_file=None)
    controller.args = SimpleNamespace(ckpt=ckpt, actor=SimpleNamespace(backend="deepspeed"))
    controller.costs = SimpleNamespace(begin=lambda: None, end=dict, response_tokens=1)
    controller.experience_maker = SimpleNamespace(seconds={}, audit=SimpleNamespace(batches=0, closed=False))
    controller.samples_generator = SimpleNamespace(dispatched=0, at_end_of_episode=False)
    controller.heartbeat, controller.failed_saves = None, []
    controller.metrics_writer, controller.warnings = MetricsWriter(tmp_path / "metrics.jsonl"), {}
    controller.kl_ctl, controller.spikes = SimpleNamespace(value=0.0), Spikes(8.0)
    saved: list[Any] = []
    upstream: Any = trainer._UpstreamTrainer
    monkeypatch.setattr(upstream, "save_logs_and_checkpoints", lambda self, step, logs, states: saved.append(states))
    monkeypatch.setattr(
        upstream,
        "init_checkpoint_states",
        lambda self: json.loads(json.dumps(saved[-1])) | {"total_consumed_prompts": 0},
    )
    for step in range(1, 31):
        controller.save_logs_and_checkpoints(step, {"kl": 0.01 + 0.001 * (step % 7)}, {})
    for _ in range(2):
        with pytest.raises(TrainingStopped, match="kl of step 31 is 9, "):
            controller.save_logs_and_checkpoints(31, {"kl": 9.0}, {})
        assert len(saved) == 30 and json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["kl"] == 9.0
        controller.spikes, controller._states = Spikes(8.0), None
        controller.init_checkpoint_states()


def test_a_kl_that_is_not_finite_leaves_the_coefficient(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController

    controller = object.__new__(EntropyTrainer)
    controller.args = SimpleNamespace(
        train=SimpleNamespace(max_restarts=0), actor=SimpleNamespace(backend="deepspeed"), ckpt=None
    )
    controller.costs = SimpleNamespace(sampled=lambda rows: None, trained=lambda: None)
    controller.samples_generator = SimpleNamespace(tokens=0)
    controller.experience_maker = SimpleNamespace(rescued=[], metrics={}, outcome=None, credit=None)
    controller.metrics_writer, controller.warnings, controller.heartbeat = None, {}, None
    controller.kl_ctl = AdaptiveKLController(0.1, 6.0, 1000)
    monkeypatch.setattr(trainer, "step_warnings", lambda *arguments: {})
    upstream: Any = trainer._UpstreamTrainer

    def step(self: Any, rows: Any, number: int) -> Any:
        self.kl_ctl.update(math.nan, 64)
        return {}, number + 1

    monkeypatch.setattr(upstream, "train_step", step)
    controller.train_step([], 0)
    assert controller.kl_ctl.value == 0.1
