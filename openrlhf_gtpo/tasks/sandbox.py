"""Runs a model's Python, for agents' tools, in a confined process. ``confined`` leaves it only what a computation
needs: the files of its own folder, one thread, some seconds and some memory.

Works only on Linux. The time limit excludes waiting for a processor, so that a reward does not depend on other
programs and on how busy the host is.
"""

import asyncio
import math
import os
import select
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from openrlhf_gtpo.platform.patience import others_work

_PLACES = ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4), "sandbox")  # as many threads as asyncio.to_thread has
_WAITING = 1.0  # seconds of waiting that /proc may not have counted yet
# -S: site's .pth files may import anything. -I drops all folders but the interpreter's.
_COMMAND = [sys.executable, "-I", "-S", "-B", "-u", str(Path(__file__).with_name("confined.py"))]
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "JE_ARROW_MALLOC_CONF": "background_thread:false"}
_ENVIRONMENT |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


async def run_python(
    program: str, *, seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 16, output: int = 2000
) -> str:
    """Run ``program``; return its stdout and stderr up to its end, a limit, or ``output`` bytes. A last line names the
    limit that ended it.

    A program may wait for others to end. Neither that nor its own time counts as silence of its agent. A program whose
    call is cancelled runs on to its limits.

    Args:
        seconds: of processor time, rounded up, and of wall time minus waiting for a processor.
        memory_mb: of address space.
        disk_mb: in its working folder: all files together where namespaces are allowed, else each file.
    """
    with others_work():
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_PLACES, _run, program, seconds, memory_mb, disk_mb, output)


def _run(program: str, seconds: float, memory_mb: int, disk_mb: int, output: int) -> str:
    said, ended = b"", ""
    with _folder() as folder, tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        limits = map(str, (os.getpid(), math.ceil(seconds), memory_mb, disk_mb, folder))
        began = time.monotonic()
        # A pidfd tells when the program ends, even if something else still holds its stdout.
        with subprocess.Popen(
            [*_COMMAND, *limits, *site.getsitepackages()],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            pidfd, stdout = os.pidfd_open(process.pid), process.stdout.fileno()
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(stdout, select.POLLIN)
            try:
                # Read until the program ends, prints too much or runs out of time, without its waits for a processor.
                while len(said) <= output:
                    left = seconds + _WAITING - (time.monotonic() - began - _waited(process.pid))
                    if left <= 0:
                        ended = f"[ended after {seconds:g} s]"
                        break
                    ready = [descriptor for descriptor, _ in poll.poll(max(50, left * 1000))]
                    if stdout in ready:
                        part = os.read(stdout, output + 1 - len(said))
                        said += part
                        if not part:  # the program has closed it, and may still run
                            poll.unregister(stdout)
                    elif ready:
                        break
            finally:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os.close(pidfd)
    # Say what ended it.
    if len(said) > output:
        said, ended = said[:output], f"[ended after {output} bytes of output]"
    elif process.returncode == -signal.SIGXCPU:
        ended = f"[ended after {seconds:g} s]"
    elif process.returncode < 0 and not ended:
        ended = f"[ended by {signal.Signals(-process.returncode).name}]"
    return "\n".join(filter(None, (said.decode(errors="replace").rstrip(), ended)))


@contextmanager
def _folder() -> Iterator[str]:
    """A folder that is removed after the block. If this process is killed, another one, which sees its stdin close,
    removes it."""
    folder = tempfile.mkdtemp(prefix="sandbox_")
    # Repeat: folders may be unlistable, and a program that is being ended may still write.
    again = '{ chmod -R u+rwx "$0"; rm -rf "$0"; } || { sleep 1; rm -rf "$0"; }'
    remove = f'read _; rm -rf "$0" 2>/dev/null || {again}'
    with subprocess.Popen(["/bin/sh", "-c", remove, folder], stdin=subprocess.PIPE, start_new_session=True):
        yield folder


def _waited(pid: int) -> float:
    """Seconds that a process has waited for a processor; 0 where /proc does not have it."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


@cache
def _tried() -> str:
    """The output of a test program: 42, and the MB of its folder's disk."""
    program = "import os; disk = os.statvfs('.'); print(6 * 7, disk.f_blocks * disk.f_frsize >> 20)"
    return _run(program, 20.0, 512, 16, 2000)  # not awaited: an engine imports its agent inside an event loop


def why_no_sandbox() -> str | None:
    """Say in a clause why this host cannot confine programs; None if it can."""
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    try:
        return None if _tried().startswith("42 ") else _tried() or "the confined process printed nothing"
    except OSError as error:
        return f"it cannot be started: {error}"


def has_disk_in_memory() -> bool:
    """Tell whether a program's files are limited in total, because this host allows namespaces."""
    return why_no_sandbox() is None and _tried() == "42 16"
