"""A request to stop ends the right run, after a step whose checkpoint is written."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from openrlhf_gtpo.errors import StoppedOnRequest
from openrlhf_gtpo.training.controller import stop
from tests.support.controllers import Group, controller, run_arguments


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def arguments(path: Path, stop_file: Path | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        ckpt=SimpleNamespace(path=str(path), stop_file=stop_file and str(stop_file)),
        train=SimpleNamespace(async_enable=False),
    )


@pytest.mark.parametrize(("save_steps", "step"), [(-1, 3), (4, 3), (4, 8)])
def test_a_request_saves_whatever_the_schedule_says_and_waits_for_it(
    tmp_path: Path, save_steps: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = run_arguments(tmp_path, "--actor.backend", "megatron", "--ckpt.save_steps", str(save_steps))
    run = controller(monkeypatch, args, actors := Group())
    run.step = step
    stop.stop_file(args).touch()
    with pytest.raises(StoppedOnRequest, match=f"after step {step}, which is saved in {tmp_path}"):
        run.save()
    assert actors.saves() == [("save_checkpoint", f"global_step{step}"), ("finish_checkpoint", None)]
    assert actors.waited == [True]
    assert not stop.stop_file(args).exists()  # already followed, so the resumed run must not see it


def test_a_run_that_is_asked_to_stop_makes_no_further_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(number: int) -> dict[str, float]:
        if number == 1:
            stop.stop_file(args).touch()
        return {}

    args = run_arguments(tmp_path)
    run = controller(monkeypatch, args, actors := Group(status=status))
    with pytest.raises(StoppedOnRequest, match="after step 2"):
        run.fit()
    assert len(actors.trained) == 2 and list(actors.saved) == ["global_step2"]


def test_a_request_before_the_first_step_needs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = tmp_path / "request"
    run = controller(monkeypatch, run_arguments(tmp_path, "--ckpt.stop_file", str(request)), actors := Group())
    request.touch()
    with pytest.raises(StoppedOnRequest, match="before the first step"):
        run.fit()
    assert not request.exists() and not actors.called


def test_a_stale_request_does_not_stop_the_next_run(tmp_path: Path) -> None:
    args = arguments(tmp_path / "checkpoints")
    stop.prepare(args)
    stop.stop_file(args).touch()
    stop.prepare(args)
    assert not stop.stop_file(args).exists()


def test_a_named_request_may_come_before_the_run(tmp_path: Path) -> None:
    args = arguments(tmp_path / "checkpoints", tmp_path / "folder" / "attempt-2")
    stop.prepare(args)
    stop.stop_file(args).touch()
    stop.prepare(args)
    assert stop.stop_file(args).exists()


def test_sigusr1_to_the_driver_is_a_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path)
    stop.prepare(args)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert stop.stop_file(args).exists() and "saves a checkpoint after this step and stops" in capsys.readouterr().err
    shutil.rmtree(stop.stop_file(args).parent)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "SIGUSR1: the run does not stop, because " in capsys.readouterr().err


def test_the_driver_hands_the_request_on() -> None:
    """It comes out of the controller's task error with the text that it had there."""
    from openrlhf_gtpo.training.controller.failures import cause_of

    inner = ray.exceptions.RayTaskError("fit", "traceback", StoppedOnRequest("asked to")).as_instanceof_cause()
    outer = ray.exceptions.RayTaskError("train", "traceback", inner).as_instanceof_cause()
    found = cause_of(outer, StoppedOnRequest)
    assert str(found) == "asked to"
