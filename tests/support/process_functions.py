"""Functions for ranks in the tests of ``run_processes``; in their own file, as processes find functions by name."""

import importlib
import os
import signal
import sys
import time
from typing import Any

import psutil
import torch

from openrlhf_gtpo.platform.processes import run_processes


class Misprint(ValueError):
    """A user's mistake, as a rank finds it."""


class Importing:
    """Becomes the module of that name when it is unpickled."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> tuple:
        return importlib.import_module, (self.name,)


def describe(addend: int, module: Any = None) -> dict[str, Any]:
    """Return what a rank sees, and the sum of all ranks, each plus ``addend``; ``module`` came as an argument."""
    total = torch.tensor(torch.distributed.get_rank() + addend)
    torch.distributed.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    return {
        "sum": total.item(),
        "backend": torch.distributed.get_backend(),
        "device": str(torch.cuda.current_device()),
        "threads": torch.get_num_threads(),
        "pid": os.getpid(),
        "module": getattr(module, "__name__", None),
        "listening": _listening(),
        **{name: os.environ[name] for name in names},
    }


def listeners(process: psutil.Process) -> set[tuple[str, int]]:
    """Addresses and ports at which a process listens."""
    return {tuple(c.laddr) for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


def _listening() -> set[tuple[str, int]]:
    """Addresses and ports at which any rank or the process that started them listens."""
    torch.distributed.barrier()
    found = listeners(psutil.Process()) | listeners(psutil.Process(os.getppid()))
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, found)
    return set.union(*everyone)


def misprint_on(rank: int) -> None:
    """One rank refuses while the others wait for it."""
    if torch.distributed.get_rank() == rank:
        raise Misprint("line 3 is no number")
    torch.distributed.barrier()


def interrupt_on(rank: int, how: str) -> None:
    """One rank ends badly while the others wait for it."""
    if torch.distributed.get_rank() == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "killed, its connections first":
            torch.distributed.destroy_process_group()
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(3)
    torch.distributed.barrier()


def rank_0_ends_first(addend: int, module: Any) -> dict[str, Any]:
    """Return what :func:`describe` does; the other ranks go on without rank 0 and make a group."""
    seen = describe(addend, module)
    if torch.distributed.get_rank() > 0:
        time.sleep(1.5)
        torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)
    return seen


def sleep() -> None:
    """Print the process id, then stay."""
    say(os.getpid())
    time.sleep(600)


def say(what: object) -> None:
    """Print in one write: `print` makes two where Python does not buffer, and then the lines of two ranks mix."""
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Under torchrun, or on its own: `-m tests.support.process_functions NAME WORLD_SIZE`.
    result = run_processes(globals()[sys.argv[1]], int(sys.argv[2]), *map(int, sys.argv[3:]))
    if result is not None:
        say(result)
