"""A supervised run is restarted after failures that a new start can mend, and after nothing else."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.checkpoints.folder import write_manifest
from openrlhf_gtpo.cli import train_ppo_ray
from openrlhf_gtpo.errors import Restartable, StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.report import heartbeat
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.tools.launch.process_tree import HUNG

Run = Callable[[Sequence[str], Mapping[str, str], Callable[[], bool]], int]


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        ckpt=SimpleNamespace(
            path=str(tmp_path), output_dir=f"{tmp_path}/model", stop_file=None, load_enable=False, disable_ds=False
        ),
        critic=SimpleNamespace(model_name_or_path=None),
        logger=SimpleNamespace(
            wandb=SimpleNamespace(run_name="ppo_at_noon"), metrics_path=None
        ),  # TensorBoard's folder
        train=SimpleNamespace(async_enable=False, stall_timeout=0.0, max_restarts=2),
    )


class Runs:
    """Stands in for processes: each of ``statuses`` is that of one, or a function that acts for it and returns it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *statuses: int | Run) -> None:
        self.commands: list[list[str]] = []
        self._left = list(statuses)
        monkeypatch.setattr(train_ppo_ray, "run_and_clear", self._run)

    def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        hangs: Callable[[], bool],
        locks: Sequence[int] = (),
    ) -> int:
        self.commands.append(list(command))
        status = self._left.pop(0)
        return status if isinstance(status, int) else status(command, environment, hangs)


def test_a_run_that_dies_goes_on_from_its_checkpoint_until_it_ends(args, tmp_path, monkeypatch, capsys) -> None:
    def dies_after_a_checkpoint(*_: Any) -> int:
        (tmp_path / "_actor" / "global_step2").mkdir(parents=True)
        write_manifest(tmp_path / "_actor" / "global_step2", {})
        return -signal.SIGKILL

    runs = Runs(monkeypatch, 1, dies_after_a_checkpoint, 0)
    assert train_ppo_ray.supervise(["run"], args) == 0
    first = ["run", "--ckpt.stop_file", str(tmp_path / "stop"), "--logger.wandb.run_name", "ppo_at_noon"]
    assert runs.commands == [first, first, [*first, "--ckpt.load_enable", "--ckpt.load_tag", ""]]
    assert capsys.readouterr().err.splitlines() == [
        "train_ppo_ray: the run ended with status 1 (see its last lines); restart 1 of 2 starts over, as there "
        "is no checkpoint yet.",
        "train_ppo_ray: the run's driver was killed by signal 9; restart 2 of 2 resumes from its last checkpoint.",
    ]


def save(folder: Path, tag: str, role: str = "_actor") -> None:
    (folder / role / tag).mkdir(parents=True)
    write_manifest(folder / role / tag, {})


def test_a_run_goes_on_from_no_checkpoint_but_its_own_and_the_one_asked_for(
    args, tmp_path, monkeypatch, capsys
) -> None:
    """With --ckpt.disable_ds the folder may have an earlier run's; a critic's is only whole with the actor's."""
    save(tmp_path, "global_step9")
    first = ["run", "--ckpt.stop_file", str(tmp_path / "stop"), "--logger.wandb.run_name", "ppo_at_noon"]
    runs = Runs(monkeypatch, 1, 0)
    assert train_ppo_ray.supervise(["run"], args) == 0 and runs.commands == [first, first]
    assert "restart 1 of 2 starts over, as there is no checkpoint yet." in capsys.readouterr().err
    args.ckpt.load_enable, args.critic.model_name_or_path = True, "MODEL"
    save(tmp_path, "global_step9", "_critic")

    def dies_in_a_save(*_: Any) -> int:
        save(tmp_path, "global_step10")
        return 1

    runs = Runs(monkeypatch, dies_in_a_save, lambda *_: save(tmp_path, "global_step10", "_critic") or 1, 0)
    assert train_ppo_ray.supervise(["run"], args) == 0
    assert runs.commands == [first, first, [*first, "--ckpt.load_enable", "--ckpt.load_tag", ""]]
    assert capsys.readouterr().err.count("resumes from its last checkpoint") == 2


@pytest.mark.parametrize(("status", "kept"), [(0, 0), (2, 2), (65, 1), (75, 75), (143, 143), (129, 129)])
def test_an_end_on_purpose_is_the_end(status: int, kept: int, args, monkeypatch) -> None:
    runs = Runs(monkeypatch, status)
    assert train_ppo_ray.supervise(["run"], args) == kept
    assert len(runs.commands) == 1


@pytest.mark.parametrize(("status", "word"), [(130, "interrupted"), (143, "terminated"), (129, "hung up")])
@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_signal_is_the_end_and_says_what_there_is_to_go_on_from(
    status: int, word: str, has_checkpoint: bool, args, tmp_path, training, monkeypatch, capsys
) -> None:
    if has_checkpoint:
        save(tmp_path, "global_step7")
    Runs(monkeypatch, status)
    assert train_ppo_ray.main([]) == status
    way_on = "there is no checkpoint to resume from; rerun with --ckpt.load_enable to start over in the same folders"
    if has_checkpoint:
        way_on = f"rerun with --ckpt.load_enable to resume from {tmp_path}/_actor/global_step7"
    assert capsys.readouterr().err == f"train_ppo_ray stopped: {word}; {way_on}.\n"


def test_sigterm_ends_a_run_with_a_sentence_before_ray_is_there(args, training, monkeypatch, capsys) -> None:
    args.train.max_restarts = 0

    def rays_handler(args: SimpleNamespace) -> None:
        sys.exit(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    for terminated in (rays_handler, lambda args: os.kill(os.getpid(), signal.SIGTERM)):
        monkeypatch.setattr(train_ppo_ray, "train", terminated)
        assert train_ppo_ray.main([]) == 143
        assert "stopped: terminated; there is no checkpoint to resume from; rerun" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("restarts", "said"),
    [
        (
            2,
            "train_ppo_ray stopped: the run's driver was killed by signal 6, after 2 restarts; there is no checkpoint "
            "to resume from",
        ),
        (
            0,
            "train_ppo_ray stopped: the run's driver was killed by signal 6; there is no checkpoint to",
        ),
    ],
)
def test_restarts_are_counted(restarts: int, said: str, args, monkeypatch, capsys) -> None:
    args.train.max_restarts = restarts
    runs = Runs(monkeypatch, *[-signal.SIGABRT] * (restarts + 1))
    assert train_ppo_ray.supervise(["run"], args) == 1
    assert len(runs.commands) == restarts + 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


def test_a_request_to_stop_outlives_the_run_that_it_was_made_to(args, tmp_path, monkeypatch) -> None:
    (tmp_path / "stop").touch()  # a request to an earlier run

    def dies_when_asked(*_: Any) -> int:
        assert not (tmp_path / "stop").exists()
        os.kill(os.getpid(), signal.SIGUSR1)
        return 1

    def stops(*_: Any) -> int:
        assert (tmp_path / "stop").exists()
        return 75

    Runs(monkeypatch, dies_when_asked, stops)
    assert train_ppo_ray.supervise(["run"], args) == 75


def test_a_run_without_a_sign_of_life_hangs(args, tmp_path, monkeypatch, capsys) -> None:
    """But not while it starts, while its steps follow each other, or because of what an earlier run left behind."""
    args.train.stall_timeout = 60.0
    now = 1000.0
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now)
    controller = Heartbeat(tmp_path)
    controller.beat()

    def stalls(command: Any, environment: Any, hangs: Callable[[], bool]) -> int:
        nonlocal now
        for seconds in (0, 1000):  # while engines start
            now += seconds
            assert not hangs()
        for beat in range(3):
            controller.beat()
            os.utime(tmp_path / "heartbeat", ns=(beat, beat))  # a wrong time, as by another node's clock
            assert not hangs()
            now += 59
            assert not hangs()
        now += 2
        assert hangs()
        return HUNG

    def ends(command: Any, environment: Any, hangs: Callable[[], bool]) -> int:
        nonlocal now
        now += 1000
        assert not hangs()
        return 0

    Runs(monkeypatch, stalls, ends)
    assert train_ppo_ray.supervise(["run"], args) == 0
    assert not (tmp_path / "heartbeat").exists()
    noticed, restarted = capsys.readouterr().err.splitlines()
    said = "train_ppo_ray: no progress for 60 s (--train.stall_timeout)"
    assert noticed == f"{said}; ending the run." and restarted.startswith(f"{said}; restart 1 of 2")


def test_only_a_stall_timeout_counts_silence(args, monkeypatch) -> None:
    def ends(command: Any, environment: Any, hangs: Callable[[], bool]) -> int:
        monkeypatch.setattr(Heartbeat, "silence", lambda self: 1e9)
        assert not hangs()
        return 0

    Runs(monkeypatch, ends)
    assert train_ppo_ray.supervise(["run"], args) == 0


@pytest.fixture
def training(args, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What training is to raise, and whether it began."""
    said: dict[str, Any] = {"error": None, "began": False}

    def train(args: SimpleNamespace) -> None:
        said["began"] = True
        if said["error"] is not None:
            raise said["error"]

    monkeypatch.setattr(train_ppo_ray, "parse", lambda argv: args)
    monkeypatch.setattr(train_ppo_ray, "check", lambda args: None)
    monkeypatch.setattr(train_ppo_ray, "check_earlier_runs", lambda args: None)
    monkeypatch.setattr(train_ppo_ray, "train", train)
    return said


@pytest.mark.parametrize(
    ("error", "alone", "supervised"),
    [
        (None, 0, 0),
        (UsageError("no"), 2, 2),
        (TrainingStopped("no"), 1, 65),
        (Restartable("no"), 1, 1),
        (StoppedOnRequest("no"), 75, 75),
        (KeyboardInterrupt(), 130, 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_run_tells_its_supervisor_whether_it_would_fail_again(
    error, alone, supervised, args, training, monkeypatch
) -> None:
    training["error"] = error
    args.train.max_restarts = 0
    assert train_ppo_ray.main([]) == alone
    args.train.max_restarts = 2
    monkeypatch.setenv("OPENRLHF_GTPO_SUPERVISED", "1")
    assert train_ppo_ray.main([]) == supervised
    assert "OPENRLHF_GTPO_SUPERVISED" not in os.environ  # what it starts is not supervised


@pytest.mark.parametrize(("flag", "value"), [("max_restarts", 1), ("stall_timeout", 60.0)])
def test_either_flag_has_the_run_supervised(flag: str, value: float, args, training, monkeypatch) -> None:
    args.train.max_restarts = 0
    setattr(args.train, flag, value)

    def run(command: Sequence[str], environment: Mapping[str, str], hangs: Callable[[], bool]) -> int:
        assert environment["OPENRLHF_GTPO_SUPERVISED"] and not training["began"]
        return 75

    runs = Runs(monkeypatch, run)
    assert train_ppo_ray.main(["--train.seed", "7"]) == 75
    assert runs.commands[0][:5] == [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", "--train.seed", "7"]
