"""A lock that a killed compiler left behind is taken over; one that is held is waited for. Nothing is compiled."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from openrlhf_gtpo.platform.compile_lock import CompileLock

HOLD = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """A lock like torch's, left behind by a process that was killed while it held it."""
    lock = tmp_path / "fused_adam" / "lock"
    lock.parent.mkdir()
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline()
    process.kill()
    process.wait()
    assert lock.exists() and not FileBaton(str(lock)).try_acquire()
    return lock


def test_the_lock_of_a_killed_compiler_is_taken_over(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.utime(killed, (time.time() - 601,) * 2)
    baton = CompileLock(str(killed))
    assert baton.try_acquire() and killed.exists() and str(killed.parent) in capsys.readouterr().out
    baton.release()
    assert not killed.exists()


def test_a_lock_at_work_is_waited_for(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A compiler on this host, or on another that shares the folder, is writing files."""
    os.utime(killed, (0, 0))
    (killed.parent / "multi_tensor_adam.o").touch()
    baton, acquired = CompileLock(str(killed), wait_seconds=0.01), threading.Event()
    thread = threading.Thread(target=lambda: baton.try_acquire() and acquired.set(), daemon=True)
    thread.start()
    assert not acquired.wait(0.5)
    killed.unlink()
    assert acquired.wait(600)
    thread.join()
    baton.release()
    assert (
        capsys.readouterr().out == f"Waiting for the compilation in {killed.parent}, or for 600 s without a new file\n"
    )
