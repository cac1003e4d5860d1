"""Runs a function in several processes of this host, joined by ``torch.distributed``: like ``torchrun``, but from
inside a command line. The processes and their rendezvous store listen only on the loopback interface.

If ``torchrun`` or ``srun`` has already started the processes, on one host or many, the function runs in this one.
``torch.distributed.launcher`` could start them too, but its stores listen on every interface. It also returns a rank's
exception as text (torch 2.13), so a command could not recognize a user's mistake.
"""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from openrlhf_gtpo import platform

_LOOPBACK = "127.0.0.1"
# After a rank raised an error that a lost connection may explain, seconds to wait for another rank's death. Also how
# long a rank may take to end after a SIGTERM.
_SECONDS_TO_DIE = 2

T = TypeVar("T")


class LaunchError(ValueError):
    """The requested processes cannot be started. Raised before any starts."""


class ProcessFailed(RuntimeError):
    """A rank raised an exception, or ended without a result.

    Fields:
        rank: the process's rank.
        reason: its traceback, or how it ended.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason.strip()}")
        self.rank = rank
        self.reason = reason


def launched_world_size() -> int | None:
    """Return the number of processes that ``torchrun`` or ``srun`` has started, including this one; None without them.

    Raises:
        LaunchError: the launcher's environment is incomplete, or the rank is not below the size.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    variables = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size = variables["RANK"], variables["WORLD_SIZE"]
    if not (all(variables.values()) and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise LaunchError(
            "Expected RANK < WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, got "
            + " ".join(f"{name}={value}" for name, value in variables.items())
            + "; start this command with torchrun, or unset RANK and WORLD_SIZE to let it start its processes itself."
        )
    return int(size)


def is_first_process() -> bool:
    """True in the process that prints for the whole launch: rank 0, or the only one that the user has started."""
    return not {"RANK", "WORLD_SIZE"} <= os.environ.keys() or os.environ["RANK"] == "0"


def run_processes(function: Callable[..., T], world_size: int, *args: Any) -> T:
    """Call ``function(*args)`` in ``world_size`` processes joined by ``torch.distributed``; return rank 0's result.

    Each process is set up for the platform, sees RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and has a
    default process group: gloo without CUDA, NCCL with one GPU per process. Unless OMP_NUM_THREADS is set, the cores
    are divided among them. The first process to fail ends the others. Under a launcher, the result is this process's
    own.

    Args:
        function: defined at a module's top level; it and ``args`` are pickled.

    Raises:
        LaunchError: fewer GPUs than processes, or a launcher has started a different number of processes.
        ValueError: as a rank raised it, with its traceback as the cause.
        ProcessFailed: a rank raised anything else, or died.
    """
    # Under torchrun or srun, join the other processes.
    chosen = platform.detect()
    launched = launched_world_size()
    if launched is not None:
        if launched != world_size:
            raise LaunchError(f"Expected {world_size} processes, got WORLD_SIZE={launched}; start that many.")
        os.environ.update(_platform_environment(chosen))
        with _process_group(store=None):
            return function(*args)
    if world_size < 1:
        raise LaunchError(f"Expected at least 1 process, got {world_size}.")

    import torch

    if chosen == "cuda" and torch.cuda.device_count() < world_size:
        raise LaunchError(
            f"{world_size} processes need a GPU each, and this host has {torch.cuda.device_count()}; use fewer, or "
            "start this command on several hosts with torchrun."
        )
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    # The store runs in this process, because rank 0 may end before the others. The store now owns the socket.
    store = torch.distributed.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        return _run_here(function, args, world_size, _shared_environment(chosen, world_size, port))
    finally:
        del store


def _platform_environment(chosen: str) -> dict[str, str]:
    # A CPU run must not find a device on a host that has one.
    return {platform.PLATFORM_VARIABLE: chosen} | ({"CUDA_VISIBLE_DEVICES": ""} if chosen == "cpu" else {})


def _shared_environment(chosen: str, world_size: int, port: int) -> dict[str, str]:
    defaults = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // world_size)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        **_platform_environment(chosen),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
    }


def _run_here(function: Callable[..., T], args: tuple, world_size: int, shared: Mapping[str, str]) -> T:
    """Implement :func:`run_processes` on this host. A dead rank is reported before one that raised, because the lost
    connection may be why it raised. If several raised, the first is reported."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    work = pickle.dumps((function, args))  # before anything starts: raises if the function cannot be pickled
    with TemporaryDirectory() as name:
        folder = Path(name)
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # no warnings of ended ranks
        # Set before the start: OpenMP reads its variables when torch is imported, before `_serve` runs.
        with _environment(shared):
            context = start_processes(_serve, (work, folder), world_size, join=False, start_method="spawn")
        try:
            while not context.join(grace_period=_SECONDS_TO_DIE):
                pass
            return pickle.loads((folder / "result").read_bytes())
        except (ProcessExitedException, ProcessRaisedException) as failed:
            # Prefer a dead rank, then the first user error, then the first other error.
            dead = [
                ProcessFailed(rank, f"the process {_ending(process.exitcode)} without a message")
                for rank, process in enumerate(context.processes)
                if process.exitcode not in (0, -signal.SIGTERM) and not (folder / str(rank)).exists()
            ]
            files = sorted(folder.glob("[0-9]*"), key=lambda file: file.stat().st_mtime_ns)
            raised = [(int(file.name), *pickle.loads(file.read_bytes())) for file in files]
            for rank, error, text in raised:
                if error is not None:
                    raise error from ProcessFailed(rank, text)
            others = [ProcessFailed(rank, text) for rank, _, text in raised]
            raise next(iter(dead + others), ProcessFailed(failed.error_index, str(failed))) from None
        finally:
            for process in context.processes:
                if process.is_alive():  # after Ctrl-C
                    process.kill()
                process.join()


def _ending(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _serve(rank: int, work: bytes, folder: Path) -> None:
    """Run a rank: write rank 0's result, or this rank's exception (None unless it is a ValueError) and traceback, to
    ``folder``."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    try:
        import torch

        # Unpickle last: the function's module may import packages that the platform has to prepare first.
        platform.activate()
        function, args = pickle.loads(work)
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        with _process_group(store):
            result = function(*args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except BaseException as error:  # SystemExit too: if a rank ends silently, the others wait forever
        text = traceback.format_exc()
        try:
            message = pickle.dumps((error if isinstance(error, ValueError) else None, text))
        except Exception:  # an exception's class may fail in any way
            message = pickle.dumps((None, text))
        (folder / str(rank)).write_bytes(message)
        os._exit(1)


@contextlib.contextmanager
def _process_group(store: Any) -> Iterator[None]:
    """Create the default process group, over ``store`` or the address in the launcher's environment."""
    import torch

    platform.activate()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    backend = "gloo"
    if platform.chosen_platform() == "cuda":
        backend = "nccl"
        local_rank = int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
        torch.cuda.set_device(local_rank)
    where = {"store": store} if store is not None else {"init_method": "env://"}
    torch.distributed.init_process_group(backend, rank=rank, world_size=world_size, **where)
    torch.distributed.barrier()  # a rank that ends at once would close connections that others are still opening
    yield
    # Not after an exception: other ranks may wait for this one, and it would wait for them.
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set ``values`` in this process's environment within this context; new processes inherit them."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _end_with_parent() -> None:
    """Exit when the parent does. A killed parent cannot end its children, which would hold their devices forever. The
    signal that torch arranges is ignored inside a collective, and entirely behind a shell's ``&``."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
