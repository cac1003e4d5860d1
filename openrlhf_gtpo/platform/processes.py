"""Runs a function in several processes of this host, joined by ``torch.distributed``: what ``torchrun`` does, from
inside a command line. Such processes and the store where they meet listen only on the loopback interface.

If ``torchrun`` or ``srun`` has already started the processes, on one host or many, the function runs in this one.
"""

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from openrlhf_gtpo import platform

_LOOPBACK = "127.0.0.1"
_SECONDS_TO_END = 10  # after a SIGTERM
# How long a rank's death may take to show after another rank has raised what a lost connection may explain.
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


class _Answer(NamedTuple):
    """A rank's report: its result, or its exception (if it is a ValueError) and traceback."""

    value: Any
    traceback: str | None


def launched_world_size() -> int | None:
    """Number of processes that ``torchrun`` or ``srun`` has started, including this one; None if this one is alone.

    Raises:
        LaunchError: the launcher's environment is incomplete, or the rank is not below the size.
    """
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        return None
    given = {name: os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    rank, size = given["RANK"], given["WORLD_SIZE"]
    if not (all(given.values()) and rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise LaunchError(
            "Expected RANK < WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun sets them, got "
            + " ".join(f"{name}={value}" for name, value in given.items())
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
    context = multiprocessing.get_context("spawn")
    work = pickle.dumps((function, args))  # before anything starts: a function that cannot be pickled is refused here
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    seconds_to_end = 0
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            pipes.append(ours)
            process = context.Process(target=_serve, args=(theirs,), name=f"rank {rank}")
            # Set before the start: OpenMP reads its variables when torch is loaded, which may be before `_serve`.
            with _environment({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
                process.start()
            processes.append(process)
            theirs.close()
        for pipe in pipes:
            with contextlib.suppress(BrokenPipeError):  # it has died; its answer is the end of the pipe
                pipe.send_bytes(work)
        result = _result_of_rank_0(pipes, processes)
        seconds_to_end = _SECONDS_TO_END
        return result
    finally:
        for pipe in pipes:
            pipe.close()
        _end(processes, seconds_to_end)


def _result_of_rank_0(pipes: list[Connection], processes: list[BaseProcess]) -> Any:
    """Wait until all ranks are done, and return rank 0's result.

    Raises:
        ProcessFailed, ValueError: as :func:`run_processes`. A dead rank takes precedence over one that raised, which
            may have lost its connection to it; a ValueError has no such cause, so it does not wait for a death.
    """
    result = None
    waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    raised: list[tuple[int, _Answer]] = []  # in the order in which they were heard of
    while waiting:
        ready: list[Any] = wait(list(waiting), _SECONDS_TO_DIE if raised else None)
        for pipe in sorted(ready, key=lambda pipe: waiting[pipe]):
            rank = waiting.pop(pipe)
            try:
                answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):  # the latter if it has not even read its work
                processes[rank].join(_SECONDS_TO_END)
                code = processes[rank].exitcode or 0
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise ProcessFailed(rank, f"the process {how} and left no message of its own here") from None
            if answer.traceback is not None:
                raised.append((rank, answer))
            elif rank == 0:
                result = answer.value
        if raised and (not ready or any(isinstance(answer.value, ValueError) for _, answer in raised)):
            break
    if raised:
        rank, answer = raised[0]
        cause = ProcessFailed(rank, answer.traceback or "")
        if isinstance(answer.value, ValueError):
            raise answer.value from cause
        raise cause
    return result


def _end(processes: list[BaseProcess], seconds: float) -> None:
    """End the processes, each after at most ``seconds`` in which it may end by itself."""
    for process in processes:
        process.join(seconds)
        if process.exitcode is None:
            process.terminate()
    for process in processes:
        process.join(_SECONDS_TO_END)
        if process.exitcode is None:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    """The main function of a rank: run what it is sent and return the result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = _call(pipe.recv_bytes())
    except (EOFError, KeyboardInterrupt):  # the parent gave up, or the user did
        os._exit(1)
    try:
        message = pickle.dumps(answer)
    except Exception:  # a result's or an exception's own class may refuse in any way
        answer = _Answer(None, answer.traceback or traceback.format_exc())
        message = pickle.dumps(answer)
    with contextlib.suppress(OSError, EOFError):
        pipe.send_bytes(message)
        if answer.traceback is not None:
            # The connections to the other ranks stay open until the parent has read this, so that no other rank's
            # complaint about a lost connection comes first.
            pipe.recv_bytes()


def _call(work: bytes) -> _Answer:
    try:
        import torch

        # The function's module may import what the platform has to prepare first.
        platform.activate()
        function, args = pickle.loads(work)
        store = torch.distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
        )
        with _process_group(store):
            return _Answer(function(*args), None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too: a rank that ends without an answer leaves the others waiting
        return _Answer(error if isinstance(error, ValueError) else None, traceback.format_exc())


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
    """Set ``values`` in this process's environment, which new processes inherit, within this context."""
    before = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update(before)


def _end_with_parent() -> None:
    """Exit when the parent does: a killed parent cannot end its processes, which would hold their devices forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
