"""The vLLM side of the weight transfer: a worker extension that takes buckets into the model."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from openrlhf_gtpo.weight_sync import broadcast_group
from openrlhf_gtpo.weight_sync.arrivals import Arrivals, Receipt
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, WireBucket, from_wire, numel, unpack
from openrlhf_gtpo.weight_sync.shared_buffer import open_shared, place

Weights = Iterable[tuple[str, torch.Tensor]]


class WeightReceiver:
    """Mixed into vLLM's worker (``worker_extension_cls``), which owns ``device`` and ``model_runner``.

    On CPU vLLM repacks linear weights after loading and can only reload a model as a whole, from tensors that it keeps
    until a layer is complete.
    """

    device: torch.device
    model_runner: Any

    def join_weight_group(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        """Join the trainer's broadcast group as rank ``rank_offset`` + this worker's rank in its engine."""
        rank = rank_offset + self._rank_in_engine()
        self._weight_group = broadcast_group.join(host, port, rank, world_size, self.device)

    def receive_weights(self, buckets: list[WireBucket], prove: bool) -> Receipt | None:
        """Take every broadcast bucket in turn and load it. ``buckets`` lists the whole model, in wire order.

        At most two buckets are held at a time, and on CPU the layers that are not complete. Returns what arrived if
        asked to ``prove`` it.
        """
        incoming = self._broadcast([from_wire(bucket) for bucket in buckets])
        arrivals = Arrivals(self.model_runner.get_model()) if prove else None
        self._load(incoming, arrivals)
        for _ in incoming:  # a loader that stops early must not leave the trainer waiting
            pass
        return arrivals.receipt() if arrivals else None

    def receive_bucket(
        self, bucket: WireBucket, handles: dict[str, bytes], index: int, count: int, prove: bool
    ) -> Receipt | None:
        """Take bucket ``index`` of ``count`` out of the memory that a trainer process on this GPU, or host, has filled.

        It has been read when this returns. With the last one the memory is let go of, and what arrived is returned if
        asked to ``prove`` it.
        """
        if index == 0:
            self._sync = _ColocatedSync(Arrivals(self.model_runner.get_model()) if prove else None)
        sync = self._sync
        weights = unpack(from_wire(bucket), sync.open(handles, self.device))
        if self.device.type == "cpu":
            sync.kept += [(name, tensor.clone()) for name, tensor in weights]
        else:
            self._load(weights, sync.arrivals)
        if index + 1 < count:
            return None
        del self._sync
        if self.device.type == "cpu":
            self._load(sync.kept, sync.arrivals)
        return sync.arrivals.receipt() if sync.arrivals else None

    def _rank_in_engine(self) -> int:
        return torch.distributed.get_rank()

    def _load(self, weights: Weights, arrivals: Arrivals | None) -> None:
        if arrivals is None:
            self._take_in(weights)
            return
        with arrivals.loading():
            self._take_in(arrivals.watch(weights))

    def _take_in(self, weights: Weights) -> None:
        if self.device.type == "cpu":
            self.model_runner.reload_weights(weights_iterator=weights)
            self._pack_heads_again()
        else:
            self.model_runner.get_model().load_weights(weights)
            torch.cuda.synchronize()

    def _pack_heads_again(self) -> None:
        """On CPU vLLM computes logits from a packed copy of the head's weight. A head tied to the embedding gets no
        weight of its own in a reload, which updates the shared weight and leaves the copy stale (vLLM 0.29)."""
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "tie_weights"):  # vLLM's ParallelLMHead
                module.quant_method.process_weights_after_loading(module)

    def _broadcast(self, plan: list[list[ParameterMeta]]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in plan:
            buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=self.device)
            self._weight_group.start(buffer)(lambda: None)
            yield from unpack(bucket, buffer)


class _ColocatedSync:
    """A transfer from a trainer on this GPU, or host, that is under way.

    Fields:
        kept: on CPU, copies of what came so far.
    """

    def __init__(self, arrivals: Arrivals | None) -> None:
        self.arrivals = arrivals
        self.kept: list[tuple[str, torch.Tensor]] = []
        self._mapped: dict[bytes, torch.Tensor] = {}

    def open(self, handles: dict[str, bytes], device: torch.device) -> torch.Tensor:
        """The buffer on ``device`` among ``handles``, opened once."""
        here = place(device)
        if here not in handles:
            raise RuntimeError(
                f"No trainer process shares weights with an engine on {here}, only on {sorted(handles)}."
            )
        handle = handles[here]
        if handle not in self._mapped:
            self._mapped[handle] = open_shared(handle, device)
        return self._mapped[handle]
