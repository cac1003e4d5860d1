"""The entropy bonus follows the entropy, and a run whose entropy collapses ends with a checkpoint."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.features.entropy_target import EntropyTarget
from openrlhf_gtpo.training.features.entropy_target.controller import EntropyControl
from tests.support.controllers import Group, controller, run_arguments
from tests.support.rollouts import arguments

TARGET = ("--algo.entropy_target", "0.5", "--algo.entropy_coef_delta", "0.3")


def batch_of(entropy: float, actions: bool = True) -> Any:
    """A rollout whose actions have this entropy on average, and whose other places have junk."""
    values = torch.tensor([[entropy - 0.1, entropy + 0.1, 99.0], [99.0, 99.0, entropy]])
    return SimpleNamespace(values=TokenValues(values, values), mask=(values < 99) & actions)


def test_the_coefficient_follows_the_rule_of_skywork_or1() -> None:
    """As a loop of its own: up by delta at or below the target, down above it, within 0 and 1; applied only below."""
    control = EntropyControl(arguments(*TARGET, "--actor.entropy_coef", "0.2"))
    expected, coefficient = [], 0.2
    entropies = [0.4, 0.3, 0.9, 0.9, 0.1, 0.1, 0.1, 0.1, 0.1, 2.0, 0.45, 0.9, 0.9, 0.9, 0.9, 0.9, 0.4]
    found = []
    for entropy in entropies:
        control.on_batch(batch_of(entropy), [])
        found.append(control.loss_weights()["entropy_coef"])
        coefficient = max(coefficient - 0.3, 0) if entropy > 0.5 else min(coefficient + 0.3, 1)
        expected.append(coefficient if entropy <= 0.5 else 0.0)
    assert found == pytest.approx(expected) and max(found) == 1 and min(found) == 0
    control.on_batch(batch_of(9.0, actions=False), [])  # no token says anything
    assert control.loss_weights()["entropy_coef"] == found[-1]


def test_what_it_does_not_touch() -> None:
    plain = arguments()
    assert not EntropyTarget(plain).is_on() and plain.actor.entropy_coef is None
    floor_alone = arguments("--algo.entropy_floor", "0.1", "--algo.advantage.estimator", "group_norm")
    assert floor_alone.logger.entropy_enable and floor_alone.actor.entropy_coef is None
    control = EntropyControl(floor_alone)
    control.on_batch(batch_of(0.2), [])
    assert control.loss_weights() == {} and control.why_to_end() is None


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_a_resumed_run_has_the_coefficients_of_one_that_was_not_stopped(
    estimator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entropies here are 1: below the target, so the bonus rises in each step."""
    argv = ("--algo.entropy_target", "1.5", "--ckpt.save_steps", "1")

    def coefficients(folder: Path, actors: Group, *more: str) -> list[float]:
        given: list[Any] = []
        monkeypatch.setattr(
            actors, "fit", lambda kl_ctl, entropy_coef: given.append(entropy_coef) or Group.fit(actors, kl_ctl)
        )
        args = run_arguments(folder, *argv, *more, estimator=estimator)
        controller(monkeypatch, args, actors, prompts=16).fit()
        logged = [row[names.ENTROPY_COEFFICIENT] for row in read_runs(folder)[-1] if row["kind"] == names.KIND_TRAIN]
        assert logged[-len(given) :] == given
        return given

    whole = coefficients(tmp_path / "run", actors := Group())
    assert whole == pytest.approx([0.005, 0.01, 0.015, 0.02])
    states = actors.saved["global_step2"]["client_states"]
    assert coefficients(tmp_path / "again", Group(states), "--ckpt.load_enable") == whole[2:]


def test_a_collapsed_run_ends_after_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step with too little entropy is logged and saved, though no save was due; another floor lets it go on."""
    argv = ("--ckpt.save_steps", "-1", "--ckpt.load_enable", "--algo.entropy_floor")
    args = run_arguments(tmp_path, *argv, "1.1")
    why = "mean entropy is 1 nats per token, below --algo.entropy_floor 1.1"
    with pytest.raises(TrainingStopped, match=rf"{why}.* Step 1 was the last; it is saved in {tmp_path}"):
        controller(monkeypatch, args, actors := Group(), prompts=8).fit()
    assert list(actors.saved) == ["global_step1"]
    steps = [row["step"] for row in read_runs(tmp_path)[-1] if row["kind"] == names.KIND_TRAIN]
    assert steps == [1]
    again = Group(actors.saved["global_step1"]["client_states"])
    args = run_arguments(tmp_path, *argv, "0.9")
    controller(monkeypatch, args, again, prompts=8).fit()
    assert len(again.trained) == 1
