"""Processes joined over gloo that run one function after another, each rank with the same arguments."""

import gc
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from openrlhf_gtpo import platform

TIMEOUT = 600  # seconds; a rank that waits forever for another is a failure, a slow one on a busy machine is not
GRACE = 10  # seconds for the other ranks once one has failed, since they may be waiting for it


class RankPool:
    """``size`` processes; :meth:`run` calls a module-level function in each and returns their results in rank order.

    They start at the first call. After a call that some rank did not answer, the next call starts new ones, since a
    late answer belongs to no call.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._store: Any = None

    def run(self, function: Callable, *args: Any) -> list[Any]:
        """Call ``function`` on every rank; raises AssertionError with the traceback of every rank that failed."""
        if not self._processes:
            self._start()
        answers: list[tuple[bool, Any] | None] = [None]
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            answers = self._answers()
        finally:  # also when pytest's own time limit strikes
            if None in answers:
                self._stop()
        failures = [f"rank {i}:\n{a[1] if a else 'no answer'}" for i, a in enumerate(answers) if not (a and a[0])]
        assert not failures, "\n".join(failures)
        return [answer[1] for answer in answers if answer]

    def _answers(self) -> list[tuple[bool, Any] | None]:
        """Each rank's (success, result or traceback), in rank order; None for a rank that ended or did not answer."""
        answers: dict[Connection, tuple[bool, Any] | None] = {}
        deadline = time.monotonic() + TIMEOUT
        while len(answers) < self._size:
            silent = [pipe for pipe in self._pipes if pipe not in answers]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    answers[pipe] = pipe.recv()
                except (EOFError, ConnectionResetError):  # the latter if it has not even read its work
                    answers[pipe] = None
                if not (answers[pipe] or (False,))[0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return [answers.get(pipe) for pipe in self._pipes]

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # Importing Megatron takes 12 s of processor time; a forked rank has it imported already.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.rank_imports"])
        # The store starts here because another program could take the port before a rank has imported Megatron.
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        environment = {platform.PLATFORM_VARIABLE: "cpu"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)  # Python 3.11 gives the fork server no other path
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, self._size, port), daemon=True)
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _stop(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()  # it holds nothing that outlives it, and may be stuck in a collective
            process.join()
        self._pipes, self._processes, self._store = [], [], None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


def _serve(pipe: Connection, rank: int, size: int, port: int) -> None:
    import torch

    from tests.support import rank_imports  # noqa: F401

    # Megatron collects garbage at every layout and every checkpoint, which need not visit what stays imported.
    gc.freeze()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
