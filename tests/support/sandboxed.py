"""Runs programs in the sandbox, all at once: ``sandboxed.py PROGRAMS.json``, a list of ``run_python``'s arguments,
prints a list of what they said; without it, why there is no sandbox and whether its disk is in memory.

``--docker`` before it makes the rules of Docker's default profile this process's first, of capabilities and of calls.
``--refuse CALL ERRNO`` lets a call fail. ``--one-processor`` has all of them share one.
"""

import argparse
import asyncio
import ctypes
import errno
import json
import os
import struct
from pathlib import Path

KEPT = (0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31)  # Docker's default capabilities
NAMESPACES = 0x7E020000  # CLONE_NEW*
REFUSED = """add_key bpf fsconfig fsmount fsopen fspick io_uring_enter io_uring_register io_uring_setup keyctl mount
    mount_setattr move_mount name_to_handle_at open_by_handle_at open_tree perf_event_open pivot_root request_key setns
    umount2 unshare userfaultfd""".split()


def refuse(calls: dict[str, int], docker: bool) -> None:
    """Let ``calls`` fail with an errno each."""
    seccomp = ctypes.CDLL("libseccomp.so.2")
    seccomp.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(seccomp.seccomp_init(0x7FFF0000))
    number = seccomp.seccomp_syscall_resolve_name
    for name, error in calls.items():
        assert seccomp.seccomp_rule_add_array(rules, 0x50000 | error, number(name.encode()), 0, b"") == 0
    for bit in (1 << bit for bit in range(32) if docker and NAMESPACES >> bit & 1):
        fits = struct.pack("IIQQ", 0, 7, bit, bit)
        assert seccomp.seccomp_rule_add_array(rules, 0x50001, number(b"clone"), 1, fits) == 0
    assert seccomp.seccomp_load(rules) == 0


def main() -> None:
    """Print as JSON what the sandbox says of each program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="?", type=Path)
    parser.add_argument("--docker", action="store_true")
    parser.add_argument("--refuse", nargs=2, default=())
    parser.add_argument("--one-processor", action="store_true")
    args = parser.parse_args()
    calls = {args.refuse[0]: getattr(errno, args.refuse[1])} if args.refuse else {}
    if args.docker:
        libc = ctypes.CDLL(None)
        for capability in set(range(64)) - set(KEPT):
            libc.prctl(24, capability, 0, 0, 0)
        kept = sum(1 << capability for capability in KEPT)
        if os.getuid() == 0:
            libc.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0))
        calls |= dict.fromkeys(REFUSED, errno.EPERM) | {"clone3": errno.ENOSYS}
    if calls:
        refuse(calls, args.docker)
    if args.one_processor:
        os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

    from openrlhf_gtpo.tasks.sandbox import has_disk_in_memory, run_python, why_no_sandbox

    async def run_all() -> list[str]:
        return await asyncio.gather(*(run_python(**call) for call in json.loads(args.programs.read_text())))

    print(
        json.dumps(asyncio.run(run_all()) if args.programs else [why_no_sandbox(), has_disk_in_memory()]), flush=True
    )


if __name__ == "__main__":
    main()
