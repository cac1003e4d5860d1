"""The trainer's side of the weight transfer to engines on other GPUs: buckets of full tensors, broadcast from rank 0."""

from collections.abc import Iterator, Sequence

import torch

from openrlhf_gtpo.weight_sync import broadcast_group
from openrlhf_gtpo.weight_sync.arrivals import as_integers, check_receipts, checksums
from openrlhf_gtpo.weight_sync.broadcast_group import Finish
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, numel, pack, plan_buckets, to_wire
from openrlhf_gtpo.weight_sync.engine import Engine, raise_failure, results


class WeightSender:
    """Rank 0 of the group that joins the trainer with ``engines``.

    Args:
        engines: one per vLLM engine.
        tensor_parallel_size: workers in each engine.
        host: an address of this process that the engines can reach.
        device: where this process's tensors live.
        bucket_bytes: size of one broadcast; may change between syncs, as may ``prove``.
        prove: check by checksum that every parameter arrived.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        tensor_parallel_size: int,
        host: str,
        device: torch.device,
        bucket_bytes: int,
        prove: bool,
    ) -> None:
        self._engines = list(engines)
        self._device = device
        self.bucket_bytes = bucket_bytes
        self.prove = prove
        world_size = len(self._engines) * tensor_parallel_size + 1
        listener = broadcast_group.listen()
        port = int(listener.getsockname()[1])
        joining = [
            engine("join_weight_group", host, port, 1 + i * tensor_parallel_size, world_size)
            for i, engine in enumerate(self._engines)
        ]
        self._group = broadcast_group.join(host, port, 0, world_size, device, listener)
        results(joining)

    def send(self, parameters: Sequence[ParameterMeta], tensors: Iterator[torch.Tensor]) -> None:
        """Send the whole model: ``tensors`` yields one full tensor for every entry of ``parameters``, in order.

        What an engine raises, or its death, is passed on.

        Raises:
            WeightSyncError: an engine did not get what was sent.
        """
        plan = plan_buckets(parameters, self.bucket_bytes)
        wire_plan = [to_wire(bucket) for bucket in plan]
        receiving = [engine("receive_weights", wire_plan, self.prove) for engine in self._engines]

        def pass_on_failures() -> None:
            # An engine that has failed takes no more, and nobody else would notice.
            raise_failure(receiving)

        sent: dict[str, torch.Tensor] = {}
        under_way: list[Finish] = []
        for bucket in plan:
            buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=self._device)
            pack(bucket, tensors, buffer)  # gathers this bucket while the previous one is on its way
            if self.prove:
                sent.update(checksums(bucket, buffer))
            if under_way:
                under_way.pop()(pass_on_failures)
            under_way.append(self._group.start(buffer))
        if under_way:
            under_way.pop()(pass_on_failures)
        receipts = results(receiving)
        if self.prove:
            check_receipts(as_integers(sent), receipts)
