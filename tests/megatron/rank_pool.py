"""Processes joined over gloo that run one function after another, each rank with the same arguments."""

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

TIMEOUT = 120  # seconds; a rank that waits for another forever is a failure


class RankPool:
    """``size`` processes; :meth:`run` calls a module-level function in each and returns their results in rank order."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            for rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, size, port), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Raises AssertionError with the traceback of every rank that failed."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [pipe.recv() if pipe.poll(TIMEOUT) else (False, "no answer") for pipe in self._pipes]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(answers) if not ok]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.terminate()  # it holds nothing that outlives it
            process.join()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    import torch

    from openrlhf_gtpo import platform

    os.environ[platform.PLATFORM_VARIABLE] = "cpu"
    platform.activate()
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
