"""The trainer's side of the weight transfer to engines on its own GPUs: buckets in memory that both map."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import torch

from openrlhf_gtpo.weight_sync.arrivals import WeightSyncError, as_integers, check_receipts, checksums
from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, numel, pack, plan_buckets, to_wire
from openrlhf_gtpo.weight_sync.engine import Engine, results
from openrlhf_gtpo.weight_sync.shared_buffer import SharedBuffer, place, shared_buffer

T = TypeVar("T")

# All-gather of one picklable object a rank.
Exchange = Callable[[Any], list[Any]]


class ColocatedSender:
    """One rank of a trainer whose ranks all have the full tensors, each for the engine workers on its own GPU.

    A bucket is gathered into one of two buffers while the engines load the other. Ranks meet once a bucket: then all have
    filled it, and the engines have read the one before.

    Args:
        engines: what rank 0 calls; the other ranks have none.
        exchange: all-gather among the ranks, in their order.
        device: where this rank's tensors live, and the engine workers that it serves.
        bucket_bytes: size of a bucket; may change between syncs, as may ``prove``.
        prove: check by checksum that every parameter arrived.
    """

    def __init__(
        self, engines: Sequence[Engine], exchange: Exchange, device: torch.device, bucket_bytes: int, prove: bool
    ) -> None:
        self._engines = list(engines)
        self._exchange = exchange
        self._device = device
        self.bucket_bytes = bucket_bytes
        self.prove = prove

    def send(self, parameters: Sequence[ParameterMeta], tensors: Iterator[torch.Tensor]) -> None:
        """Send the whole model: ``tensors`` yields one full tensor for every entry of ``parameters``, in order.

        Collective. A failure of any rank or engine is raised on every rank.

        Raises:
            WeightSyncError: an engine did not get what was sent.
        """
        plan = plan_buckets(parameters, self.bucket_bytes)
        sent: dict[str, torch.Tensor] = {}
        buffers: list[SharedBuffer] = []
        loading: list[Future[list[Any]]] = []

        def share(stack: ExitStack) -> dict[str, list[bytes]]:
            for turn in (plan[::2], plan[1::2]):
                if turn:
                    largest = max(map(numel, turn))
                    buffers.append(stack.enter_context(shared_buffer(largest, self._device)))
            return {place(self._device): [buffer.handle for buffer in buffers]}

        def fill(bucket: Sequence[ParameterMeta], buffer: torch.Tensor) -> None:
            pack(bucket, tensors, buffer)
            if self.prove and self._engines:
                sent.update(checksums(bucket, buffer))
            if buffer.is_cuda:
                torch.cuda.synchronize(self._device)  # another process reads it, on a stream of its own
            results(loading)

        def finish() -> None:
            receipts = results(loading)
            if self.prove:
                check_receipts(as_integers(sent), receipts)

        with ExitStack() as stack:
            handles: dict[str, list[bytes]] = {}
            for of_rank in reversed(self._agree(partial(share, stack))):  # of ranks in one place the first serves it
                handles.update(of_rank)
            for index, bucket in enumerate(plan):
                self._agree(partial(fill, bucket, buffers[index % 2].tensor))
                here = {where: of_buffers[index % 2] for where, of_buffers in handles.items()}
                arguments = (to_wire(bucket), here, index, len(plan), self.prove)
                loading = [engine("receive_bucket", *arguments) for engine in self._engines]
            self._agree(finish)
        buffers.clear()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # memory that was still open elsewhere when it was freed here

    def _agree(self, step: Callable[[], T]) -> list[T]:
        """Every rank's result of ``step``; raises on every rank where it has failed on one."""
        result: T | None = None
        failure: Exception | None = None
        try:
            result = step()
        except Exception as error:  # the others wait for this rank, whatever it is
            failure = error
        # Exceptions of other kinds may not survive the way.
        told = failure if failure is None or isinstance(failure, WeightSyncError) else RuntimeError(repr(failure))
        answers: list[tuple[Any, Exception | None]] = self._exchange((result, told))
        if failure is not None:
            raise failure
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise other if isinstance(other, WeightSyncError) else RuntimeError(f"rank {rank}: {other}")
        return [answer for answer, _ in answers]
