"""Runs a program and leaves none of its processes behind, however far they have moved away from it.

Ray's workers and the engines that they start outlive a Ray that is killed, and rename themselves, so that nothing but
their ancestry tells whose they are. Linux keeps that: orphans of a "child subreaper" become its children.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def run_and_clear(command: Sequence[str], environment: Mapping[str, str], *, patience: float = 10.0) -> int:
    """Run ``command`` to its end, which SIGTERM, SIGINT and SIGHUP to this process bring about, then end its descendants.

    Args:
        command: program and arguments.
        environment: whole, of the program.
        patience: seconds for the program after such a signal, and for its descendants after SIGTERM, until SIGKILL.

    Returns:
        its exit status, or 128 + the signal that ended this.

    Raises:
        OSError: the program cannot be started.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    _adopt_orphans(True)
    before = {number: signal.signal(number, note) for number in _FORWARDED}
    try:
        child = subprocess.Popen(command, env=dict(environment))
        asked = None
        while child.poll() is None:
            if received and asked is None:
                child.terminate()
                asked = time.monotonic()
            elif asked is not None and time.monotonic() - asked > patience:
                child.kill()
            _reap(except_for=child.pid)
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=1.0 if asked is None else 0.2)
        end_descendants(os.getpid(), patience=patience)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _adopt_orphans(False)
    return 128 + received[0] if received else child.returncode


def _adopt_orphans(yes: bool) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def end_descendants(pid: int, *, patience: float) -> None:
    """End all descendants of the process ``pid``, which is this one: SIGTERM, and SIGKILL to what is left."""
    deadline = time.monotonic() + patience
    _send(descendants(pid), signal.SIGTERM)
    while True:
        _reap()
        left = descendants(pid)
        if not left:
            return
        if time.monotonic() > deadline:
            _send(left, signal.SIGKILL)
        time.sleep(0.1)


def descendants(pid: int) -> list[int]:
    """Processes whose parent is ``pid``, or one of these."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name, in parentheses, may hold anything.
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has just ended
            children.setdefault(parent, []).append(int(entry.name))
    found, pending = [], [pid]
    while pending:
        for child in children.get(pending.pop(), []):
            found.append(child)
            pending.append(child)
    return found


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap(except_for: int | None = None) -> None:
    """Collect adopted orphans that have ended; ``except_for`` is waited for by whoever started it."""
    for pid in descendants(os.getpid()):
        if pid == except_for:
            continue
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a grandchild
            continue
