"""Runs a function in several processes of this host, joined by ``torch.distributed``: what ``torchrun`` does, from
inside a command line. Such processes and the store where they meet listen only on the loopback interface.

If ``torchrun`` or ``srun`` has already started the processes, on one host or many, the function runs in this one.
``torch.distributed.launcher`` would start them too, but its stores listen on every interface. It also returns a rank's
exception as text (torch 2.13), in which no command could recognize a user's mistake.
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
# Seconds until a rank's death shows, after another rank has raised an error that a lost connection may explain; also
# how long a rank may take to end after a SIGTERM.
_SECONDS_TO_DIE = 2

T = TypeVar("T")


class LaunchError(ValueError):
    """Processes cannot be started as asked for; raised before any starts."""


class ProcessFailed(RuntimeError):
    """A rank raised an exception, or ended without an answer.

    Fields:
        rank: of the process.
        reason: the traceback in that process, or how it ended.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} failed: {reason.strip()}")
        self.rank = rank
        self.reason = reason


def launched_world_size() -> int | None:
    """Number of processes that ``torchrun`` or ``srun`` has started, including this one; None if this one is alone.

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
    """True in the process that speaks for the whole launch: rank 0, or the only one that the user has started."""
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
    chosen = platform.detect()
    launched = launched_world_size()
    if launched is not None:
        if launched != world_size:
            raise LaunchError(f"WORLD_SIZE={launched} processes were started, and this run needs {world_size}.")
        os.environ.update(_platform_environment(chosen))
        with _process_group(store=None):
            return function(*args)
    if world_size < 1:
        raise LaunchError(f"Expected at least 1 process, got {world_size}.")

    import torch

    if chosen == "cuda" and torch.cuda.device_count() < world_size:
        raise LaunchError(
            f"{world_size} processes need a GPU each, and this host has {torch.cuda.device_count()}; ask for fewer, "
            "or start this command on several hosts with torchrun."
        )
    listener = socket.create_server((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    # In this process rather than in rank 0, which may end before the others. The store owns the socket from here on.
    store = torch.distributed.TCPStore(
        _LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    try:
        return _run_here(function, args, world_size, _shared_environment(chosen, world_size, port))
    finally:
        del store


def _platform_environment(chosen: str) -> dict[str, str]:
    # A run that is meant to be without CUDA must not find a device on a host that has one.
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
    """As :func:`run_processes`. A dead rank is named before one that raised: losing the connection may be why it
    raised. Of several that raised, the first is named."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

    work = pickle.dumps((function, args))  # before anything starts: a function that cannot be pickled is refused here
    with TemporaryDirectory() as name:
        folder = Path(name)
        logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)  # about ranks that it terminates
        # Set before the start: OpenMP reads its variables when torch is loaded, which is before `_serve`.
        with _environment(shared):
            context = start_processes(_serve, (work, folder), world_size, join=False, start_method="spawn")
        try:
            while not context.join(grace_period=_SECONDS_TO_DIE):
                pass
            return pickle.loads((folder / "result").read_bytes())
        except (ProcessExitedException, ProcessRaisedException) as failed:
            dead = [
                ProcessFailed(rank, f"the process {_ending(process.exitcode)} and left no message of its own here")
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
    """The main function of a rank: leave rank 0's result in ``folder``, or this rank's exception (None unless it is a
    ValueError) and traceback."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    try:
        import torch

        # The function's module may import what the platform has to prepare first.
        platform.activate()
        function, args = pickle.loads(work)
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        with _process_group(store):
            result = function(*args)
        if rank == 0:
            (folder / "result").write_bytes(pickle.dumps(result))
    except BaseException as error:  # SystemExit too: a rank that ends silently leaves the others waiting
        text = traceback.format_exc()
        try:
            message = pickle.dumps((error if isinstance(error, ValueError) else None, text))
        except Exception:  # an exception's own class may refuse in any way
            message = pickle.dumps((None, text))
        (folder / str(rank)).write_bytes(message)
        os._exit(1)


@contextlib.contextmanager
def _process_group(store: Any) -> Iterator[None]:
    """The default process group of this rank, over ``store`` or what the launcher's environment names."""
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
    torch.distributed.barrier()  # a rank that is done at once would close connections that others are still making
    yield
    # Not after an exception: other ranks may be waiting for this one, and it would wait for them.
    torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Within this context, ``values`` are in this process's environment, and new processes inherit them."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _end_with_parent() -> None:
    """Exit when the parent does: a killed parent cannot end its processes, which would hold their devices forever. The
    signal that torch has sent then is not heard within a collective operation, or at all behind a shell's ``&``."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
