"""Runs a model's Python where it can do no harm: without network and other processes, on a read-only disk, and with
limits of time, memory, files and output. For agents' tools.

Linux alone does it: ``unshare`` gives the program namespaces of its own (user, network, mounts, processes), in which
every mount is made read-only (``mount_setattr``, Linux 5.12) but a small disk in memory. It has no capabilities there,
and a filter of system calls refuses new processes and threads: limits of their number do not hold for root. A
container may not allow namespaces: Docker needs ``--security-opt seccomp=unconfined`` or the like.
"""

import asyncio
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from functools import cache

_UNSHARE = (
    "unshare",
    "--user",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)
# In the namespaces, before the model's program takes this one's place. Numbers are Linux's.
_CONFINE = r"""
import ctypes, os, platform, resource, struct, sys
memory, disk, seconds = map(int, sys.argv[1:])
libc = ctypes.CDLL(None, use_errno=True)
def check(failed, what):
    if failed:
        sys.exit(f"{what}: {os.strerror(ctypes.get_errno())}")
# A disk that cannot be written, and a small one in memory.
read_only = (ctypes.c_uint64 * 4)(1, 0, 0, 0)
check(libc.syscall(442, -100, b"/", 0x8000, read_only, 32), "read-only mounts")
check(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 6, f"size={disk}m,nr_inodes=1000".encode()), "a disk in memory")
os.chdir("/tmp")
for name, limit in (("AS", memory << 20), ("FSIZE", disk << 20), ("CPU", seconds), ("NOFILE", 64), ("CORE", 0)):
    resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
# No capability survives the execv below.
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)
# No process or thread: clone, clone3, fork, vfork, and neither unshare, setns nor ptrace; nor calls of another ABI.
machine = {"x86_64": (0xC000003E, (56, 435, 57, 58, 272, 308, 101)), "aarch64": (0xC00000B7, (220, 435, 97, 268, 117))}
architecture, refused = machine[platform.machine()]
last = len(refused) + 5  # the line that refuses; a jump goes over the lines between
filter = [(0x20, 0, 0, 4), (0x15, 0, last - 2, architecture), (0x20, 0, 0, 0), (0x35, last - 4, 0, 0x40000000)]
filter += [(0x15, last - place - 1, 0, number) for place, number in enumerate(refused, 4)]
filter += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x50001)]  # allow; EPERM
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in filter))
program = struct.pack("HxxxxxxQ", len(filter), ctypes.addressof(code))
check(libc.prctl(38, 1, 0, 0, 0), "no new privileges")
check(libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0), "a filter of system calls")
os.execv(sys.executable, [sys.executable, "-I", "-B", "-"])
"""


async def run_python(
    program: str, *, seconds: float = 5.0, memory_mb: int = 512, disk_mb: int = 16, output: int = 2000
) -> str:
    """What ``program`` prints, to stdout and stderr, up to its end, its limits, or ``output`` bytes; with a last line
    that says which limit ended it.

    Args:
        seconds: of wall-clock time, and of CPU time rounded up.
        memory_mb: of address space.
        disk_mb: in /tmp, the working folder.
    """
    return await asyncio.to_thread(_run, program, seconds, memory_mb, disk_mb, output)


def _run(program: str, seconds: float, memory_mb: int, disk_mb: int, output: int) -> str:
    limits = [str(memory_mb), str(disk_mb), str(math.ceil(seconds))]
    said, ended, deadline = b"", "", time.monotonic() + seconds
    with tempfile.TemporaryFile() as source:
        source.write(program.encode(errors="replace"))
        source.seek(0)
        process = subprocess.Popen(
            [*_UNSHARE, sys.executable, "-I", "-c", _CONFINE, *limits],
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        while len(said) <= output:
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                ended = f"\n[ended after {seconds:g} s]"
                break
            part = os.read(process.stdout.fileno(), output + 1 - len(said))
            if not part:
                break
            said += part
    finally:
        process.kill()  # and with it the program (--kill-child)
        process.wait()
        process.stdout.close()
    if len(said) > output:
        said, ended = said[:output], f"\n[ended after {output} bytes of output]"
    return said.decode(errors="replace").rstrip() + ended


@cache
def why_no_sandbox() -> str | None:
    """Why this host runs no program so, as a clause; None if it does."""
    try:
        said = _run("print(6 * 7)", 20.0, 512, 16, 2000)  # not awaited: an engine imports its agent in an event loop
    except OSError as error:
        return f"unshare cannot be started: {error}"
    return (
        None if said == "42" else f"namespaces or read-only mounts are not allowed here: {said.strip() or 'no output'}"
    )
