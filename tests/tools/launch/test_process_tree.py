"""No process outlives the node that started it, and the program's status is kept."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.slurm_cluster import until

PROGRAM = "import os, sys; from openrlhf_gtpo.tools.launch.process_tree import run_and_clear; "
PROGRAM += "sys.exit(run_and_clear(sys.argv[2:], os.environ, patience=float(sys.argv[1])))"
# Its clock runs ten times as fast.
HASTY = f"import time; clock = time.monotonic; time.monotonic = lambda: 10 * clock(); {PROGRAM}"
ROOT = Path(__file__).resolve().parents[3]


def start(patience: float, shell: str, folder: Path, program: str = PROGRAM) -> subprocess.Popen:
    command = [sys.executable, "-c", program, str(patience), "bash", "-c", shell]
    return subprocess.Popen(command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)})


def pid_in(path: Path) -> int:
    until(lambda: path.exists() and path.read_text().strip(), 600, f"{path.name}")
    return int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# A grandchild in a session of its own, whose parent is gone.
ORPHAN = "(setsid bash -c 'echo $$ >orphan; exec sleep 600' &); "

DEAF_ORPHAN = "(setsid bash -c 'trap \"\" TERM; echo $$ >orphan; while :; do sleep 1; done' &); "


def test_the_programs_end_takes_its_orphans_along(tmp_path: Path) -> None:
    run = start(600, ORPHAN + "while [[ ! -s orphan ]]; do sleep 0.1; done; exit 7", tmp_path)
    assert run.wait(timeout=600) == 7
    assert not is_running(pid_in(tmp_path / "orphan"))


def test_what_the_program_did_not_start_goes_on(tmp_path: Path) -> None:
    """A shell that leaves a process and becomes this one, as `exec > >(tee log)` does."""
    words = f"sleep 600 & echo $! >tunnel; exec {sys.executable} -c '{PROGRAM}' 600 bash -c \"exit 7\""
    run = subprocess.Popen(["bash", "-c", words], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.wait(timeout=600) == 7
    tunnel = pid_in(tmp_path / "tunnel")
    assert is_running(tunnel)
    os.kill(tunnel, signal.SIGTERM)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_program_and_orphans(number: int, tmp_path: Path) -> None:
    run = start(600, ORPHAN + "echo $$ >own; exec sleep 600", tmp_path)
    orphan, own = pid_in(tmp_path / "orphan"), pid_in(tmp_path / "own")
    run.send_signal(number)
    assert run.wait(timeout=600) == 128 + number
    assert not is_running(orphan) and not is_running(own)


def test_what_ignores_the_request_is_killed(tmp_path: Path) -> None:
    run = start(0.5, DEAF_ORPHAN + "trap '' TERM; echo $$ >own; while :; do sleep 1; done", tmp_path, HASTY)
    orphan, own = pid_in(tmp_path / "orphan"), pid_in(tmp_path / "own")
    run.terminate()
    assert run.wait(timeout=600) == 128 + signal.SIGTERM
    assert not is_running(orphan) and not is_running(own)


def test_what_hangs_is_ended_with_its_orphans(tmp_path: Path) -> None:
    """It ends soon, although both are stopped and the program would then take its time to end."""
    program = HASTY.replace("patience=", "hangs=lambda: os.path.exists('hangs'), patience=")
    run = start(600, ORPHAN + "trap '' TERM; echo $$ >own; while :; do sleep 1; done", tmp_path, program)
    orphan, own = pid_in(tmp_path / "orphan"), pid_in(tmp_path / "own")
    for pid in (orphan, own):
        os.kill(pid, signal.SIGSTOP)
    (tmp_path / "hangs").touch()
    assert run.wait(timeout=600) == 124
    assert not is_running(orphan) and not is_running(own)


def test_an_error_of_the_caller_ends_program_and_orphans(tmp_path: Path) -> None:
    """It reaches the caller, whose signals are its own again."""
    program = HASTY.replace("patience=", "hangs=lambda: os.path.exists('error') and 1 / 0, patience=")
    program = program.replace("sys.exit", "import signal\ntry: ")
    program += "\nexcept ZeroDivisionError: sys.exit(5 * (signal.getsignal(signal.SIGTERM) == signal.SIG_DFL))"
    run = start(600, ORPHAN + "trap '' TERM; echo $$ >own; while :; do sleep 1; done", tmp_path, program)
    orphan, own = pid_in(tmp_path / "orphan"), pid_in(tmp_path / "own")
    (tmp_path / "error").touch()
    assert run.wait(timeout=600) == 5
    assert not is_running(orphan) and not is_running(own)


def test_the_program_ends_with_what_runs_it_though_that_is_killed(tmp_path: Path) -> None:
    run = start(600, "echo $$ >own; exec sleep 600", tmp_path)
    own = pid_in(tmp_path / "own")
    run.kill()
    until(lambda: not is_running(own), 600, "its end")


def test_processes_of_others_are_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert start(600, "exit 0", tmp_path).wait(timeout=600) == 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
