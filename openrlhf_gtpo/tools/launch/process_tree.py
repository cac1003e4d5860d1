"""Runs a program and leaves none of its processes behind, even if they have detached from it.

Ray's workers, and the engines that they start, outlive a killed Ray. They rename themselves, so that only their
ancestry shows whose they are. Linux preserves ancestry: orphans of a "child subreaper" become its children. A raylet
can be one too (https://github.com/ray-project/ray/pull/42992), but then it dies with the processes that it should end.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress

import psutil  # vLLM and DeepSpeed depend on it

HUNG = 124  # the exit status of coreutils' timeout

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here, because few calls are safe between fork and exec
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PATIENCE = 5.0  # seconds from SIGTERM to SIGKILL for a hung program and for orphans, which have nothing to finish
_GIVE_UP = 60.0  # seconds until orphans that survive SIGKILL, stuck on a device or a disk, are abandoned


def run_and_clear(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    patience: float = 10.0,
    hangs: Callable[[], bool] = lambda: False,
    locks: Sequence[int] = (),
    output: int | None = None,
) -> int:
    """Run ``command`` until it ends, or until SIGTERM, SIGINT or SIGHUP to this process ends it. Then end its
    descendants. If this process is killed, the program gets SIGTERM.

    Args:
        environment: the program's whole environment.
        patience: seconds from such a signal to SIGKILL.
        hangs: called about once a second. True, or an error, also ends the program, with less patience.
        locks: file descriptors that the program inherits, so that their locks last as long as it runs.
        output: descriptor of the program's output; None for this process's own.

    Returns:
        The program's exit status, -N if signal N killed it, 128 + the signal that this process received, or HUNG.

    Raises:
        OSError: the program cannot be started.
    """
    received: list[int] = []
    hung = False
    others = set(psutil.Process().children())  # children of a shell that became this process, like `tee`
    # Adopt orphans, and collect signals instead of dying of them (SIGHUP stays ignored under nohup).
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    handled = [number for number in _FORWARDED if not (nohup and number == signal.SIGHUP)]
    before = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    try:
        child = subprocess.Popen(
            command,
            env=dict(environment),
            pass_fds=locks,
            preexec_fn=_end_with_parent,
            stdout=output,
            stderr=output,
        )
        end = os.pidfd_open(child.pid)  # Popen.wait polls twenty times a second
        signaled = None
        # Wait: after a signal or a hang, SIGTERM first, and SIGKILL once its time is up.
        while child.poll() is None:
            if signaled is None and (received or (hung := hangs())):
                child.terminate()
                child.send_signal(signal.SIGCONT)  # a stopped process does not take SIGTERM before this
                signaled = time.monotonic()
            elif signaled is not None and time.monotonic() - signaled > (patience if received else _PATIENCE):
                child.kill()
            _reap(except_for=child.pid)
            select.select([end], [], [], 1.0 if signaled is None else 0.2)
        os.close(end)
    finally:
        try:
            _end_descendants(others)  # includes the program if hangs() raised
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            _prctl(_PR_SET_CHILD_SUBREAPER, 0)
    return 128 + received[0] if received else HUNG if hung else child.returncode


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _end_descendants(others: Set[psutil.Process]) -> None:
    """End all descendants of this process except ``others``."""
    began = time.monotonic()
    for process in _descendants(others):
        with suppress(psutil.Error):
            process.terminate()
            process.resume()  # a stopped process does not take SIGTERM before this
    while True:
        _reap()
        survivors = _descendants(others)
        waited = time.monotonic() - began
        if not survivors:
            return
        if waited > _GIVE_UP:
            print(f"Warning: SIGKILL did not end, after {waited:.0f} s: {survivors}", file=sys.stderr, flush=True)
            return
        for process in survivors if waited > _PATIENCE else ():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)


def _descendants(others: Set[psutil.Process]) -> list[psutil.Process]:
    descendants: list[psutil.Process] = []
    for child in psutil.Process().children():
        if child not in others:
            with suppress(psutil.NoSuchProcess):
                descendants += [child, *child.children(recursive=True)]
    return descendants


def _reap(except_for: int | None = None) -> None:
    """Reap adopted orphans that have ended, without ``except_for``, for which its starter waits."""
    with suppress(ChildProcessError):  # there is no child
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid == except_for:
                return
            os.waitpid(ended.si_pid, 0)
