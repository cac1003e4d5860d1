"""A step whose numbers stand out ends the run before being saved."""

import math
import random
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.errors import Restartable, TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training.features.spikes import SpikeWatch
from openrlhf_gtpo.training.features.spikes.spikes import Spikes
from tests.support.controllers import Group, controller, run_arguments
from tests.support.rollouts import arguments


def after(steps: int, limit: float = 8.0) -> Spikes:
    """``Spikes`` after ``steps`` steps whose gradient norms are normal with mean 1 and standard deviation 0.1."""
    spikes, generator = Spikes(arguments("--train.spike_zscore", str(limit))), random.Random(0)
    for step in range(steps):
        spikes.on_step(step + 1, {"actor_grad_norm": generator.gauss(1.0, 0.1), "kl": 0.01, "policy_loss": None})
    return spikes


@pytest.mark.parametrize(("steps", "window"), [(20, 20), (200, 50)])
def test_a_spike_is_named(steps: int, window: int) -> None:
    spikes = after(steps)
    with pytest.raises(  # (5 - 1) / 0.1 is 40; 20 numbers give the spread to within about a quarter
        Restartable,
        match=rf"^actor_grad_norm of step {steps + 1} is 5, [3-5]\d\.\d robust standard deviations above the "
        rf"median (1\.\d+|0\.9\d+) of the {window} steps before it \(--train\.spike_zscore 8\)\. "
        r"The step is not saved\.$",
    ):
        spikes.on_step(steps + 1, {"actor_grad_norm": 5.0})


def test_what_is_no_spike() -> None:
    after(19).on_step(20, {"actor_grad_norm": 1e9})  # too few to say
    assert not SpikeWatch(arguments("--train.spike_zscore", "0")).is_on()
    spikes = after(60)
    spikes.on_step(61, {"actor_grad_norm": 0.0})  # a step without a gradient
    spikes.on_step(62, {"actor_grad_norm": math.nan, "kl": math.inf})  # skipped, which is counted elsewhere
    spikes.on_step(63, {"kl": 5.0})  # kl has not varied, so nothing says how far is far
    spikes.on_step(64, {"reward/mean": 1e9})
    spikes.on_step(65, {"actor_grad_norm": 1e9, names.RESCUE_ROWS: 0.1})  # rescue rows are not like the others
    assert max(spikes.recent["actor_grad_norm"]) < 2
    with pytest.raises(Restartable, match="ppo_kl of step 96 "):
        for step in range(66, 97):
            spikes.on_step(step, {"ppo_kl": 0.01 * (step % 7) if step < 96 else 9.0, names.RESCUE_ROWS: 0.1})
    assert all(map(math.isfinite, sum(spikes.recent.values(), [])))


def test_a_spike_is_logged_and_neither_saved_nor_forgotten_by_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run resumed from the checkpoint before the spike knows the steps before it, and meets it again."""

    def status(number: int) -> dict[str, float]:
        return {"kl": 9.0 if number == 25 else 0.01 + 0.001 * (number % 7)}

    argv = ("--ckpt.save_steps", "1", "--train.spike_zscore", "8")
    actors = Group(status=status)
    args = run_arguments(tmp_path, *argv)
    with pytest.raises(TrainingStopped, match="kl of step 26 is 9, .* of the 25 steps before it"):
        controller(monkeypatch, args, actors, prompts=120).fit()

    def last() -> Any:
        return [row for row in read_runs(tmp_path)[-1] if row["kind"] == names.KIND_TRAIN][-1]

    assert list(actors.saved)[-1] == "global_step25" and (last()["step"], last()["kl"]) == (26, 9.0)
    states = actors.saved["global_step25"]["client_states"]
    args = run_arguments(tmp_path, *argv, "--ckpt.load_enable")
    with pytest.raises(TrainingStopped, match="kl of step 26 is 9, .* of the 25 steps before it"):
        again = Group(states, lambda number: status(number + 25))
        controller(monkeypatch, args, again, prompts=120).fit()
    assert not again.saved
