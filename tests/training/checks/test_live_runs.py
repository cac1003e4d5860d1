"""Of two live runs with a folder in common, the second waits and is refused; a dead run hinders none."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.checks import live_runs
from openrlhf_gtpo.training.checks.live_runs import alone

PROGRAM = """
import subprocess, sys
from types import SimpleNamespace
from openrlhf_gtpo.training.checks.live_runs import alone

ckpt = SimpleNamespace(path=sys.argv[1], output_dir=sys.argv[2])
with alone(SimpleNamespace(ckpt=ckpt, logger=SimpleNamespace(metrics_path=sys.argv[3])), patience=0.0) as locks:
    if sys.argv[4] == "supervised":
        print(subprocess.Popen(["sleep", "600"], pass_fds=locks, stdout=subprocess.DEVNULL).pid, flush=True)
    print("alone", flush=True)
    sys.stdin.readline()
"""


def run_of(folder: Path, **results: Path) -> SimpleNamespace:
    path, output = results.get("path", folder / "checkpoints"), results.get("output_dir", folder / "model")
    ckpt = SimpleNamespace(path=str(path), output_dir=str(output))
    return SimpleNamespace(ckpt=ckpt, logger=SimpleNamespace(metrics_path=str(results.get("metrics", folder / "m"))))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a process that trains into ``tmp_path / "first"``, and has begun to."""
    started: list[subprocess.Popen[str]] = []

    def begin(how: str = "") -> subprocess.Popen[str]:
        first = run_of(tmp_path / "first")
        words = [first.ckpt.path, first.ckpt.output_dir, first.logger.metrics_path, how]
        command = [sys.executable, "-c", PROGRAM, *words]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def read(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("shared", ["path", "output_dir", "metrics"])
def test_a_second_run_with_a_result_in_common_is_refused(shared: str, start, tmp_path: Path, monkeypatch) -> None:
    first = start()
    assert read(first) == "alone"
    places = {"path": "checkpoints", "output_dir": "model", "metrics": "m"}
    flag = {"path": "--ckpt.path", "output_dir": "--ckpt.output_dir", "metrics": "--logger.metrics_path"}[shared]
    monkeypatch.chdir(tmp_path)  # another name of the same place
    second = run_of(tmp_path / "second", **{shared: Path("first") / places[shared]})
    with pytest.raises(UsageError, match=rf"^{flag} \S*first/{places[shared]} is in use .*process {first.pid} on "):
        with alone(second, patience=0.0):
            pytest.fail("it has begun")
    with alone(run_of(tmp_path / "second"), patience=0.0):  # with nothing in common, and after a refusal
        pass
    assert not [*(tmp_path / "second").rglob("*.lock")]


def test_after_a_killed_run_the_next_begins_at_once(start, tmp_path: Path) -> None:
    first = start()
    assert read(first) == "alone"
    first.kill()
    first.wait()
    with alone(run_of(tmp_path / "first"), patience=0.0):
        pass
    assert not [*tmp_path.rglob("*.lock")]


def test_a_supervised_run_that_outlives_its_supervisor_keeps_the_locks(start, tmp_path: Path) -> None:
    supervisor = start("supervised")
    run = int(read(supervisor))
    assert read(supervisor) == "alone"
    supervisor.kill()
    supervisor.wait()
    try:
        with pytest.raises(UsageError, match="is in use by another run"), alone(run_of(tmp_path / "first"), 0.0):
            pytest.fail("it has begun")
    finally:
        os.kill(run, 9)
    with alone(run_of(tmp_path / "first")):
        pass


def test_a_run_waits_for_one_that_is_ending(start, tmp_path: Path, monkeypatch, capsys) -> None:
    first = start()
    assert read(first) == "alone"
    ends = SimpleNamespace(monotonic=time.monotonic, strftime=time.strftime, sleep=lambda _: first.communicate("\n"))
    monkeypatch.setattr(live_runs, "time", ends)
    with alone(run_of(tmp_path / "first"), patience=600.0):
        said = capsys.readouterr().err.splitlines()
    assert (
        len(said) == 1
        and f"in use by another run (process {first.pid} on" in said[0]
        and "waiting up to 600 s" in said[0]
    )


def test_a_lock_that_its_holder_has_just_removed_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def remove_first(file: Any, operation: int) -> None:
        Path(file.name).unlink()
        monkeypatch.setattr(fcntl, "flock", flock)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with alone(run_of(tmp_path), patience=0.0):
        assert len([*tmp_path.rglob("*.lock")]) == 3


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    def refuses(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with alone(run_of(tmp_path)):
        assert capsys.readouterr().err.count("cannot be locked (No locks available)") == 3


def test_results_may_lie_in_one_folder(tmp_path: Path) -> None:
    with alone(run_of(tmp_path, path=tmp_path, output_dir=tmp_path, metrics=tmp_path / "run"), patience=0.0):
        pass
