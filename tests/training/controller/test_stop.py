"""A request to stop ends the right run, after a step whose checkpoint is written."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.training.controller import stop
from openrlhf_gtpo.training.controller.spikes import Spikes
from openrlhf_gtpo.training.controller.trainer import EntropyTrainer, _UpstreamTrainer


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts itself when it is asked for results, and there are none here."""
    monkeypatch.setattr(ray, "get", lambda results: results)


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


def arguments(path: Path, stop_file: Path | None = None, **ckpt: Any) -> SimpleNamespace:
    values = {
        "path": str(path),
        "stop_file": stop_file and str(stop_file),
        "save_steps": 4,
        "disable_ds": False,
    } | ckpt
    return SimpleNamespace(
        ckpt=SimpleNamespace(**values),
        train=SimpleNamespace(async_enable=False, max_restarts=0),
        logger=SimpleNamespace(logging_steps=1),
        eval=SimpleNamespace(before_training=False),
        actor=SimpleNamespace(backend="deepspeed"),
    )


class Group:
    """Actors that only record what they were asked to do."""

    def __init__(self) -> None:
        self.called: list[tuple[str, Any]] = []

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        self.called.append((method_name, kwargs.get("tag")))
        return []


def controller(args: SimpleNamespace) -> EntropyTrainer:
    trainer = object.__new__(EntropyTrainer)
    trainer.args = args
    trainer.actor_model_group, trainer.critic_model_group = Group(), None
    trainer.wandb_logger = trainer.tensorboard_logger = trainer.metrics_writer = trainer.heartbeat = None
    trainer.kl_ctl, trainer.spikes = SimpleNamespace(value=0.0), Spikes(0.0)
    trainer.best_eval_metric_key, trainer.best_eval_metric_value = "none", float("-inf")
    trainer._latest_eval_metric_value = None
    trainer.warnings, trainer.failed_saves = {}, []
    trainer.costs = SimpleNamespace(begin=lambda: None, end=dict, response_tokens=1)
    trainer.experience_maker = SimpleNamespace(seconds={}, audit=SimpleNamespace(batches=0, closed=False))
    trainer.samples_generator = SimpleNamespace(dispatched=0, at_end_of_episode=False)
    return trainer


@pytest.mark.parametrize(("save_steps", "step"), [(float("inf"), 3), (4, 3), (4, 8)])
def test_a_request_saves_whatever_the_schedule_says_and_waits_for_it(tmp_path: Path, save_steps, step) -> None:
    args = arguments(tmp_path, save_steps=save_steps)
    args.actor.backend = "megatron"
    trainer = controller(args)
    stop.stop_file(args).touch()
    with pytest.raises(StoppedOnRequest, match=f"after step {step}, which is saved in {tmp_path}"):
        trainer.save_logs_and_checkpoints(step, {}, {"global_step": step})
    assert trainer.actor_model_group.called == [
        ("finish_checkpoint", None),
        ("save_checkpoint", f"global_step{step}"),
        ("finish_checkpoint", None),
    ]
    assert args.ckpt.save_steps == save_steps
    assert not stop.stop_file(args).exists()  # already followed, so the resumed run must not see it


def test_without_a_request_steps_are_saved_as_upstream_does(tmp_path: Path) -> None:
    trainer = controller(arguments(tmp_path))
    for step in range(1, 9):
        trainer.save_logs_and_checkpoints(step, {}, {"global_step": step})
    assert trainer.actor_model_group.called == [
        ("save_checkpoint", "global_step4"),
        ("save_checkpoint", "global_step8"),
    ]


class FullDisk(Group):
    """Actors whose next ``failures`` saves find no room."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        super().async_run_method(method_name, **kwargs)
        if method_name == "save_checkpoint" and self.failures:
            self.failures -= 1
            cause = CheckpointWriteError(f"The checkpoint {kwargs['tag']} could not be written: [Errno 28] No space.")
            raise ray.exceptions.RayTaskError(method_name, "traceback", cause).as_instanceof_cause()
        return []


def test_training_goes_on_without_a_checkpoint_and_tries_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = controller(arguments(tmp_path))
    trainer.actor_model_group = group = FullDisk(1)
    trainer.metrics_writer = SimpleNamespace(write=lambda *row: rows.append(row), phase=lambda phase: None)
    rows: list[Any] = []
    for step in range(4, 10):
        trainer.save_logs_and_checkpoints(step, {}, {"global_step": step})
    assert group.called == [("save_checkpoint", "global_step4"), ("save_checkpoint", "global_step8")]
    assert "global_step4 could not be written: [Errno 28] No space. The disk of" in capsys.readouterr().out
    warned = [step for _, step, row in rows if "global_step4" in row.get("warning/checkpoint", "")]
    assert warned == [5]


def test_a_best_checkpoint_that_is_not_saved_is_not_the_best(tmp_path: Path) -> None:
    trainer = controller(arguments(tmp_path))
    trainer.best_eval_metric_key = "eval_pass1"
    trainer.actor_model_group = group = FullDisk(1)
    trainer.save_best_checkpoint({"eval_pass1": 0.9}, 4)
    assert trainer.best_eval_metric_value == float("-inf")
    trainer.save_best_checkpoint({"eval_pass1": 0.8}, 8)
    assert trainer.best_eval_metric_value == 0.8
    assert [tag for _, tag in group.called] == ["best_global_step4", "best_global_step8"]


class LateGroup(Group):
    """Actors that save in the background: what became of a save shows at the next call."""

    def __init__(self, failing: str) -> None:
        super().__init__()
        self.failing, self.pending = failing, ""

    def async_run_method(self, method_name: str, **kwargs: Any) -> list[Any]:
        super().async_run_method(method_name, **kwargs)
        tag, self.pending = self.pending, kwargs.get("tag", "")
        if tag == self.failing:
            cause = CheckpointWriteError(f"The checkpoint {tag} could not be written: [Errno 28] No space.")
            raise ray.exceptions.RayTaskError(method_name, "traceback", cause).as_instanceof_cause()
        return []


@pytest.mark.parametrize(("failing", "best"), [("best_global_step4", 0.5), ("global_step4", 0.9), ("neither", 0.9)])
def test_a_best_checkpoint_counts_once_it_is_written(tmp_path: Path, failing: str, best: float) -> None:
    """The failure of the step's regular save, which is still in the background, is another's."""
    args = arguments(tmp_path)
    args.actor.backend = "megatron"
    trainer = controller(args)
    trainer.best_eval_metric_key, trainer.best_eval_metric_value = "eval_pass1", 0.5
    trainer.actor_model_group = LateGroup(failing)
    trainer.save_logs_and_checkpoints(4, {}, {"global_step": 4})
    trainer.save_best_checkpoint({"eval_pass1": 0.9}, 4)
    assert trainer.best_eval_metric_value == best and len(trainer.failed_saves) == (failing != "neither")


def test_a_request_to_stop_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    args = arguments(tmp_path)
    trainer = controller(args)
    beats: list[Any] = []  # whoever watches the run learns of every try
    trainer.heartbeat = SimpleNamespace(beat=beats.append)
    for failures, ending in ((3, StoppedOnRequest), (1000, TrainingStopped)):
        trainer.actor_model_group = FullDisk(failures)
        stop.stop_file(args).touch()
        with pytest.raises(ending):
            trainer.save_logs_and_checkpoints(3, {}, {})
    assert len(waited) == 3 + 59 and len(beats) == 4 + 60


def test_an_asynchronous_save_comes_to_its_end_in_a_later_step(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.actor.backend = "megatron"
    trainer = controller(args)
    trainer.save_logs_and_checkpoints(4, {}, {})
    trainer.save_logs_and_checkpoints(5, {}, {})
    assert [name for name, _ in trainer.actor_model_group.called] == [
        "finish_checkpoint",
        "save_checkpoint",
        "finish_checkpoint",
    ]


def test_a_complete_save_has_its_name_before_the_next_step_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Any, samples: list[Any], step: int) -> None:
        raise RuntimeError("a rank died")

    args = arguments(tmp_path)
    args.actor.backend = "megatron"
    trainer = controller(args)
    trainer.costs.sampled, trainer.samples_generator.tokens = lambda samples: None, 0
    trainer.experience_maker.rescued = []
    waits: list[bool] = []
    monkeypatch.setattr(trainer, "_finish_checkpoint", waits.append)
    monkeypatch.setattr(_UpstreamTrainer, "train_step", dies)
    with pytest.raises(RuntimeError, match="a rank died"):
        trainer.train_step([], 4)
    assert waits == [False]


def test_a_rollout_that_ends_the_run_does_so_once_the_last_save_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(error: Exception) -> None:
        raise error

    args = arguments(tmp_path)
    args.actor.backend = "megatron"
    trainer = controller(args)
    trainer.engines = SimpleNamespace(recover=stops)
    waits: list[bool] = []
    monkeypatch.setattr(trainer, "_finish_checkpoint", waits.append)
    with pytest.raises(TrainingStopped, match="the reward raised"):
        trainer._recover(TrainingStopped("the reward raised"))
    assert waits == [True]


def test_a_run_that_cannot_save_says_so(tmp_path: Path) -> None:
    args = arguments(tmp_path, disable_ds=True)
    stop.stop_file(args).touch()
    with pytest.raises(StoppedOnRequest, match="--ckpt.disable_ds leaves no checkpoint"):
        controller(args).save_logs_and_checkpoints(1, {}, {})


def test_a_request_before_the_first_step_needs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_UpstreamTrainer, "fit", lambda self, step: pytest.fail("it trained"))
    args = arguments(tmp_path, tmp_path / "request")
    (tmp_path / "request").touch()
    with pytest.raises(StoppedOnRequest, match="before its first step"):
        controller(args).fit()
    assert not (tmp_path / "request").exists()


def test_a_folder_without_a_whole_checkpoint_is_a_new_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_UpstreamTrainer, "init_checkpoint_states", lambda self: {})
    states = controller(arguments(tmp_path)).init_checkpoint_states()
    assert states["global_step"] == 0 and states["episode"] == 0 and states["data_loader_state_dict"] == {}


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
    assert stop.stop_file(args).exists() and "stops after this step" in capsys.readouterr().err
    shutil.rmtree(stop.stop_file(args).parent)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "SIGUSR1: the run goes on, as " in capsys.readouterr().err


def test_asynchronous_training_keeps_the_signal(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.train.async_enable = True
    before = signal.getsignal(signal.SIGUSR1)
    stop.prepare(args)
    assert signal.getsignal(signal.SIGUSR1) is before


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a user's notes")
    with pytest.raises(UsageError, match=f"--ckpt.path {tmp_path}/file/checkpoints cannot be used"):
        stop.prepare(arguments(tmp_path / "file" / "checkpoints"))
    with pytest.raises(UsageError, match=f"--ckpt.stop_file {tmp_path}/file/request cannot be used"):
        stop.prepare(arguments(tmp_path, tmp_path / "file" / "request"))
    with pytest.raises(UsageError, match=f"--ckpt.stop_file {tmp_path} cannot be used: it is a folder"):
        stop.prepare(arguments(tmp_path, tmp_path))


def test_the_driver_hands_the_request_on() -> None:
    """It comes out of the controller's task error with the text that it had there."""
    from openrlhf_gtpo.training.controller.failures import cause_of

    inner = ray.exceptions.RayTaskError("fit", "traceback", StoppedOnRequest("asked to")).as_instanceof_cause()
    outer = ray.exceptions.RayTaskError("train", "traceback", inner).as_instanceof_cause()
    found = cause_of(outer, StoppedOnRequest)
    assert str(found) == "asked to"
