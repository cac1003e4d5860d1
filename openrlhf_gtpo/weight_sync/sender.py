"""The trainer's side of weight transfer: sends full buckets to engines on other GPUs, or on the trainer's own."""

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from functools import partial
from threading import Thread
from typing import Any, Protocol, TypeVar

import torch

from openrlhf_gtpo.weight_sync import transports
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, Weights, numel
from openrlhf_gtpo.weight_sync.receipts import WeightSyncError, check_receipts, checksums
from openrlhf_gtpo.weight_sync.transports import Finish, memory_of, shared_buffer

T = TypeVar("T")

_DEATH_IS_KNOWN = 10.0  # seconds until an engine's death is known, at most

# All-gather of one picklable object per rank.
Exchange = Callable[[Any], list[Any]]


class Engine(Protocol):
    """A vLLM engine, or a stand-in for one: calls a method of ``WeightReceiver`` on each of its workers."""

    def __call__(self, method: str, *args: Any) -> "Future[list[Any]]":
        """The workers' results, in worker order, or the exception of the first worker to fail."""


def ray_engine(actor: Any) -> Engine:
    """The engine behind the handle of a rollout actor, whose methods have the same names as the receiver's."""

    def call(method: str, *args: Any) -> "Future[list[Any]]":
        return getattr(actor, method).remote(*args).future()

    return call


class WeightSender:
    """Rank 0 of the group that joins the trainer with ``engines``.

    Args:
        engines: one per vLLM engine.
        tensor_parallel_size: workers in each engine.
        host: an address of this process that the engines can reach.
        device: where this process's tensors live.

    Raises the exception of an engine that cannot join or has died.
    """

    def __init__(self, engines: Sequence[Engine], tensor_parallel_size: int, host: str, device: torch.device) -> None:
        self._engines = list(engines)
        self._device = device
        world_size = len(self._engines) * tensor_parallel_size + 1
        # It stays open: a port that is merely free may be taken by another process before vLLM is imported and listens
        # (https://github.com/vllm-project/vllm/issues/51275).
        listener = socket.create_server(("", 0))
        port = int(listener.getsockname()[1])
        joining = [
            engine("join_weight_group", host, port, 1 + i * tensor_parallel_size, world_size)
            for i, engine in enumerate(self._engines)
        ]
        # In a thread: joining alone would wait for an engine that has died (with gloo, for half an hour).
        joined: Future[Any] = Future()

        def join() -> None:
            try:
                joined.set_result(transports.join(host, port, 0, world_size, device, listener))
            except Exception as error:
                joined.set_exception(error)

        Thread(target=join, daemon=True).start()
        _results([joined, *joining])
        self._broadcast = joined.result()

    def send(self, weights: Weights, sync_checksum: bool = False, version: int = 0) -> None:
        """Send the whole model, of that ``version``; other ranks that share it call :func:`gather` meanwhile.

        An engine's exception, or its death, is passed on.

        Raises:
            WeightSyncError: with ``sync_checksum``, an engine's checksums differ from those of the tensors sent.
        """
        receiving = [engine("receive_weights", weights.buckets, sync_checksum, version) for engine in self._engines]
        # An engine that has failed takes no more buckets, and nothing else would notice.
        check = partial(_raise_failure, receiving)
        sent: dict[str, torch.Tensor] = {}
        under_way: Finish | None = None
        try:
            for index, bucket in enumerate(weights.buckets):
                buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=self._device)
                weights.fill(index, buffer)  # gathers this bucket while the previous one is on its way
                if sync_checksum:
                    sent.update(checksums(bucket, buffer))
                if under_way:
                    under_way(check)
                under_way = self._broadcast(buffer)
            if under_way:
                under_way(check)
        except RuntimeError:  # gloo's: an engine's death has closed the connection, and Ray learns of it later
            wait(receiving, timeout=_DEATH_IS_KNOWN, return_when=FIRST_EXCEPTION)
            check()
            raise
        receipts = _results(receiving)
        if sync_checksum:
            check_receipts(sent, receipts)


def gather(weights: Weights, device: torch.device) -> None:
    """Take part in filling the buckets, on a rank that sends none."""
    for index, bucket in enumerate(weights.buckets):
        weights.fill(index, torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=device))


class ColocatedSender:
    """One rank of a trainer whose ranks all have the full tensors and each serve the engine workers on their own GPU.

    A bucket is gathered into one of two buffers while engines load the other. Ranks meet once per bucket: by then all
    have filled it, and the engines have read the one before.

    Args:
        engines: those that rank 0 calls; the other ranks have none.
        exchange: all-gather among the ranks, in rank order.
        device: of this rank's tensors and of the engine workers that it serves.
    """

    def __init__(self, engines: Sequence[Engine], exchange: Exchange, device: torch.device) -> None:
        self._engines = list(engines)
        self._exchange = exchange
        self._device = device

    def send(self, weights: Weights, sync_checksum: bool = False, version: int = 0) -> None:
        """Send the whole model, of that ``version``. Collective; what any rank or engine raises, every rank does.

        Raises:
            WeightSyncError: with ``sync_checksum``, an engine's checksums differ from those of the tensors sent.
        """
        sent: dict[str, torch.Tensor] = {}
        buffers: list[tuple[torch.Tensor, bytes]] = []
        loading: list[Future[list[Any]]] = []

        def share(stack: ExitStack) -> dict[str, list[bytes]]:
            for turn in (weights.buckets[::2], weights.buckets[1::2]):
                if turn:
                    buffers.append(stack.enter_context(shared_buffer(max(map(numel, turn)), self._device)))
            return {memory_of(self._device): [handle for _, handle in buffers]}

        def fill(index: int) -> None:
            buffer, _ = buffers[index % 2]
            weights.fill(index, buffer)
            if sync_checksum and self._engines:
                sent.update(checksums(weights.buckets[index], buffer))
            if buffer.is_cuda:
                torch.cuda.synchronize(self._device)  # another process reads it, on its own stream
            _results(loading)

        def finish() -> None:
            receipts = _results(loading)
            if sync_checksum:
                check_receipts(sent, receipts)

        with ExitStack() as stack:
            handles: dict[str, list[bytes]] = {}
            # Of ranks that share a memory, the first serves it.
            for rank_handles in reversed(self._agree(partial(share, stack))):
                handles.update(rank_handles)
            for index, bucket in enumerate(weights.buckets):
                self._agree(partial(fill, index))
                current = {where: pair[index % 2] for where, pair in handles.items()}
                arguments = (bucket, current, index, len(weights.buckets), sync_checksum, version)
                loading = [engine("receive_bucket", *arguments) for engine in self._engines]
            self._agree(finish)
        buffers.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # memory that was still open elsewhere when it was freed here

    def _agree(self, step: Callable[[], T]) -> list[T]:
        """Every rank's result of ``step``; raises on every rank if it has failed on one."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:  # whatever it is: the others wait for this rank
            failure = error
        # Exceptions of other kinds may not survive the exchange.
        reported = failure if failure is None or isinstance(failure, WeightSyncError) else RuntimeError(repr(failure))
        answers: list[tuple[Any, Exception | None]] = self._exchange((result, reported))
        if failure is not None:
            raise failure
        for rank, (_, raised) in enumerate(answers):
            if raised is not None:
                raise raised if isinstance(raised, WeightSyncError) else RuntimeError(f"rank {rank}: {raised}")
        return [answer for answer, _ in answers]


def _results(calls: Sequence["Future[list[Any]]"]) -> list[list[Any]]:
    """Every engine's answer; if one fails, raises its exception without waiting for the others."""
    wait(calls, return_when=FIRST_EXCEPTION)
    _raise_failure(calls)
    return [call.result() for call in calls]


def _raise_failure(calls: Sequence["Future[list[Any]]"]) -> None:
    """Raise the exception of an engine that has failed by now, if any has."""
    for call in calls:
        if call.done():
            call.result()
