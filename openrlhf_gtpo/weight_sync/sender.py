"""The trainer's side of the weight transfer: sends full buckets to engines on other GPUs, or on the trainer's own."""

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

_DEATH_IS_KNOWN = 10.0  # maximum seconds until an engine's death is noticed

# All-gather of one picklable object per rank.
Exchange = Callable[[Any], list[Any]]


class Engine(Protocol):
    """A vLLM engine, or a stand-in for one, that calls a method of ``WeightReceiver`` on each of its workers."""

    def __call__(self, method: str, *args: Any) -> "Future[list[Any]]":
        """Return the workers' results in worker order, or raise the exception of the first worker to fail."""


def ray_engine(actor: Any) -> Engine:
    """Make an engine from the handle of a rollout actor, whose methods have the same names as the receiver's."""

    def call(method: str, *args: Any) -> "Future[list[Any]]":
        return getattr(actor, method).remote(*args).future()

    return call


class WeightSender:
    """Sends weights to ``engines`` as rank 0 of a group with all their workers.

    Args:
        engines: one per vLLM engine.
        tensor_parallel_size: workers in each engine.
        host: an address of this process that the engines can reach.
        device: the device of this process's tensors.

    Raises the exception of an engine that cannot join or has died.
    """

    def __init__(self, engines: Sequence[Engine], tensor_parallel_size: int, host: str, device: torch.device) -> None:
        self._engines = list(engines)
        self._device = device
        world_size = len(self._engines) * tensor_parallel_size + 1
        # Keep the socket open: otherwise another process may take the port before vLLM is imported and listens
        # (https://github.com/vllm-project/vllm/issues/51275).
        listener = socket.create_server(("", 0))
        port = int(listener.getsockname()[1])
        joining = [
            engine("join_weight_group", host, port, 1 + i * tensor_parallel_size, world_size)
            for i, engine in enumerate(self._engines)
        ]
        # Join in a thread: the call would wait for an engine that has died (with gloo, for half an hour).
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
        """Send the whole model as ``version``; other ranks that share it call :func:`gather` meanwhile.

        Raises an engine's exception, also if it has died.

        Raises:
            WeightSyncError: with ``sync_checksum``, an engine's checksums differ from those of the tensors sent.
        """
        receiving = [engine("receive_weights", weights.buckets, sync_checksum, version) for engine in self._engines]
        # A failed engine takes no more buckets, and nothing else would notice.
        check = partial(_raise_failure, receiving)
        sent: dict[str, torch.Tensor] = {}
        under_way: Finish | None = None
        try:
            for index, bucket in enumerate(weights.buckets):
                buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=self._device)
                weights.fill(index, buffer)  # gathers this bucket while the previous one is being sent
                if sync_checksum:
                    sent.update(checksums(bucket, buffer))
                if under_way:
                    under_way(check)
                under_way = self._broadcast(buffer)
            if under_way:
                under_way(check)
        except RuntimeError:  # gloo's: a dead engine closes its connection before Ray notices
            wait(receiving, timeout=_DEATH_IS_KNOWN, return_when=FIRST_EXCEPTION)
            check()
            raise
        receipts = _results(receiving)
        if sync_checksum:
            check_receipts(sent, receipts)


def gather(weights: Weights, device: torch.device) -> None:
    """Take part in filling the buckets, on a rank that does not send."""
    for index, bucket in enumerate(weights.buckets):
        weights.fill(index, torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=device))


class ColocatedSender:
    """Sends weights to the engine workers on this rank's GPU. All ranks of the trainer have the full tensors.

    A bucket is gathered into one of two buffers while engines load the other. Ranks synchronize once per bucket: by
    then all have filled it, and the engines have read the previous one.

    Args:
        engines: the engines that rank 0 calls; empty on other ranks.
        exchange: all-gather among the ranks, in rank order.
        device: the device of this rank's tensors and of its engine workers.
    """

    def __init__(self, engines: Sequence[Engine], exchange: Exchange, device: torch.device) -> None:
        self._engines = list(engines)
        self._exchange = exchange
        self._device = device

    def send(self, weights: Weights, sync_checksum: bool = False, version: int = 0) -> None:
        """Send the whole model as ``version``. Collective: an exception of any rank or engine is raised on every rank.

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
            # The first of the ranks that share a memory serves it.
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
            torch.cuda.ipc_collect()  # memory that engines still had open when it was freed here

    def _agree(self, step: Callable[[], T]) -> list[T]:
        """Return every rank's result of ``step``; raise on every rank if it failed on one."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:  # any exception: the others wait for this rank
            failure = error
        # Other types of exceptions may not survive pickling.
        reported = failure if failure is None or isinstance(failure, WeightSyncError) else RuntimeError(repr(failure))
        answers: list[tuple[Any, Exception | None]] = self._exchange((result, reported))
        if failure is not None:
            raise failure
        for rank, (_, raised) in enumerate(answers):
            if raised is not None:
                raise raised if isinstance(raised, WeightSyncError) else RuntimeError(f"rank {rank}: {raised}")
        return [answer for answer, _ in answers]


def _results(calls: Sequence["Future[list[Any]]"]) -> list[list[Any]]:
    """Return every engine's answer; if one fails, raise its exception without waiting for the others."""
    wait(calls, return_when=FIRST_EXCEPTION)
    _raise_failure(calls)
    return [call.result() for call in calls]


def _raise_failure(calls: Sequence["Future[list[Any]]"]) -> None:
    """Raise the exception of a failed engine, if any has failed by now."""
    for call in calls:
        if call.done():
            call.result()
