"""When checkpoints are saved, and what a full disk costs: a checkpoint, and not the run."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import ray

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training.actors.actor_trainer import keep_trying
from openrlhf_gtpo.training.controller import stop
from openrlhf_gtpo.training.controller.heartbeat import Phases
from openrlhf_gtpo.training.controller.saving import Saver
from openrlhf_gtpo.training.credit.experiences import Models
from tests.support.controllers import Group, controller, run_arguments

FULL, OTHER = "[Errno 28] No space left on device", "[Errno 95] Operation not supported"
MEGATRON = ("--actor.backend", "megatron")


def save(tag: str) -> tuple[str, str]:
    return "save_checkpoint", tag


def cannot_be_written(tag: str | None, why: str = FULL) -> Exception:
    cause = CheckpointWriteError(f"The checkpoint {tag} could not be written: {why}.")
    return ray.exceptions.RayTaskError("save_checkpoint", "traceback", cause).as_instanceof_cause()


class FullDisk(Group):
    """Actors whose next ``failures`` saves find no room."""

    def __init__(self, failures: int, why: str = FULL) -> None:
        super().__init__()
        self.failures, self.why = failures, why

    def save_checkpoint(self, **given: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise cannot_be_written(given["tag"], self.why)
        super().save_checkpoint(**given)


class LateGroup(Group):
    """Actors that save in the background: what became of a save shows at the next call that concerns saving."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self.failing, self.pending = failing, ""

    def save_checkpoint(self, **given: Any) -> None:
        self.finish_checkpoint(False)
        self.pending = given["tag"]

    def finish_checkpoint(self, wait: bool) -> None:
        tag, self.pending = self.pending, ""
        if tag == self.failing:
            raise cannot_be_written(tag)


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts itself when it is asked for results, and there are none here."""
    monkeypatch.setattr(ray, "get", lambda results: results)


def saver(folder: Path, actors: Group, *argv: str) -> Saver:
    return Saver(run_arguments(folder, *argv), Models(actors, None, None, None), lambda: None)


def test_a_run_saves_as_often_as_it_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    actors = Group()
    controller(monkeypatch, run_arguments(tmp_path, "--ckpt.save_steps", "2"), actors, prompts=20).fit()
    assert actors.saves() == [save("global_step2"), save("global_step4")]
    never = Group()
    controller(monkeypatch, run_arguments(tmp_path / "never"), never, prompts=20).fit()
    assert len(never.trained) == 5 and not never.saves()


@pytest.mark.parametrize(
    ("why", "advice"), [(FULL, r"The disk of .* free\. Make room; training"), (OTHER, "Training")]
)
def test_training_goes_on_without_a_checkpoint_and_tries_again(
    why: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actors = FullDisk(1, why)
    controller(monkeypatch, run_arguments(tmp_path, "--ckpt.save_steps", "2"), actors, prompts=20).fit()
    assert actors.saves() == [save("global_step2"), save("global_step4")] and list(actors.saved) == ["global_step4"]
    said = capsys.readouterr().out
    assert re.search(rf"global_step2 could not be written: {re.escape(why)}\. {advice} continues", said)
    warned = [row["step"] for row in read_runs(tmp_path)[-1] if "global_step2" in row.get("warning/checkpoint", "")]
    assert warned == [3]


@pytest.mark.parametrize(("why", "advice"), [(FULL, " Make room for it."), (OTHER, "")])
def test_the_trained_model_is_tried_again_and_the_advice_fits(
    why: str, advice: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(folder: str) -> None:
        raise CheckpointWriteError(f"{why}.")

    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with pytest.raises(TrainingStopped) as stopped:
        keep_trying(write, "model")
    failure = f"model could not be written: {why}.{advice}"
    again = " Rerun with --ckpt.load_enable to resume from the last checkpoint in --ckpt.path."
    assert str(stopped.value) == failure + again
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 59 and said[-1] == f"Warning: {failure} Retrying every 30 s, 1 more times."


def test_a_best_checkpoint_that_is_not_saved_is_not_the_best(tmp_path: Path) -> None:
    saving = saver(tmp_path, actors := FullDisk(1), "--ckpt.best_metric_key", "eval_pass1")
    for step, value in ((4, 0.9), (8, 0.8), (12, 0.7)):
        saving.save_if_best({"eval_pass1": value}, step, {})
    assert actors.saves() == [save("best_global_step4"), save("best_global_step8")]
    assert actors.saved["best_global_step8"]["metric_value"] == 0.8


@pytest.mark.parametrize(("failing", "is_best"), [("best_global_step4", 0), ("global_step4", 1), ("neither", 1)])
def test_a_best_checkpoint_counts_once_it_is_written(tmp_path: Path, failing: str, is_best: bool) -> None:
    """The failure of the step's regular save, which is still in the background, is another's."""
    saving = saver(tmp_path, LateGroup(failing), *MEGATRON, "--ckpt.best_metric_key", "eval_pass1")
    saving.save(4, {})
    saving.save_if_best({"eval_pass1": 0.9}, 4, {})
    assert bool(saving.take_failures()) == (failing != "neither") and not saving.take_failures()
    states: dict[str, Any] = {}
    saving.save(8, states)
    assert states["best_eval_metric_value"] == (0.9 if is_best else -math.inf)


@pytest.mark.parametrize(
    ("asked", "saved", "key", "best"),
    [
        ("", "eval_x_pass1", "eval_x_pass1", 0.9),
        ("", "none", "", -math.inf),
        ("none", "eval_x_pass1", "none", -math.inf),
        ("eval_x_pass1", "eval_x_pass1", "eval_x_pass1", 0.9),
        ("eval_y_pass1", "eval_x_pass1", "eval_y_pass1", -math.inf),
        ("eval_y_pass1", "none", "eval_y_pass1", -math.inf),
    ],
)
def test_the_best_checkpoint_is_by_the_metric_of_the_resumed_runs_command_line(
    asked: str, saved: str, key: str, best: float, tmp_path: Path
) -> None:
    """Without one there, by that of the checkpoint, whose best value counts only for its own metric."""
    saving = saver(tmp_path, Group(), *(("--ckpt.best_metric_key", asked) if asked else ()))
    saving.restore({"best_eval_metric_key": saved, "best_eval_metric_value": 0.9})
    states: dict[str, Any] = {}
    saving.save(1, states)
    assert (states["best_eval_metric_key"], states["best_eval_metric_value"]) == (key, best)


def test_an_asynchronous_save_comes_to_its_end_in_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its name before anything of that step can fail."""

    def status(number: int) -> dict[str, Any]:
        if number:
            raise RuntimeError("a rank died")
        return {}

    actors = Group(status=status)
    args = run_arguments(tmp_path, *MEGATRON, "--ckpt.save_steps", "1")
    with pytest.raises(RuntimeError, match="a rank died"):
        controller(monkeypatch, args, actors).fit()
    began = actors.called.index(save("global_step1"))
    assert actors.called[began + 1 :] == [("finish_checkpoint", None), ("fit", None)]
    assert actors.waited == [False] * len(actors.waited)


def test_a_rollout_that_ends_the_run_does_so_once_the_last_save_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    actors = Group()
    run = controller(monkeypatch, run_arguments(tmp_path, *MEGATRON, "--ckpt.save_steps", "1"), actors)
    [engine] = run.engines.serving
    respond = engine.sample.remote

    def sample(*given: Any) -> Any:
        if not actors.saved:
            return respond(*given)
        cause = TrainingStopped("the reward raised")
        return lambda: fail(ray.exceptions.RayTaskError("sample", "traceback", cause).as_instanceof_cause())

    engine.sample.remote = sample
    with pytest.raises(TrainingStopped):
        run.fit()
    assert actors.called[-1] == ("finish_checkpoint", None) and actors.waited[-1] is True


def fail(error: Exception) -> None:
    raise error


def test_a_request_to_stop_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever watches the run learns of every try."""
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    beats: list[str] = []
    monkeypatch.setattr(Phases, "show", lambda self, phase: beats.append(phase))
    for failures, ending in ((3, StoppedOnRequest), (1000, TrainingStopped)):
        folder = tmp_path / str(failures)
        run = controller(monkeypatch, run_arguments(folder, "--train.stall_timeout", "60"), FullDisk(failures))
        beats.clear()
        run.step = 3
        stop.stop_file(run.args).touch()
        with pytest.raises(ending):
            run.save()
        assert len(beats) == min(failures + 1, 60)
    assert len(waited) == 3 + 59
