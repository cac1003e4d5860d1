"""The vLLM side of the weight transfer: a worker extension that loads buckets into the model."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from openrlhf_gtpo.weight_sync import transports
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, Bucket, numel, unpack
from openrlhf_gtpo.weight_sync.receipts import Arrivals, Receipt
from openrlhf_gtpo.weight_sync.transports import memory_of, open_shared

_RELOAD_LOG = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


@dataclass
class _ColocatedSync:
    """A transfer under way from a trainer on this GPU, or host.

    Fields:
        mapped: the trainer's buffers that are open here, by handle.
        kept: on CPU, copies of what has arrived so far.
    """

    arrivals: Arrivals | None
    mapped: dict[bytes, torch.Tensor] = field(default_factory=dict)
    kept: list[tuple[str, torch.Tensor]] = field(default_factory=list)


class WeightReceiver:
    """Mixed into vLLM's worker (``worker_extension_cls``), which owns ``rank``, ``device`` and ``model_runner``.

    On CPU vLLM repacks linear weights after loading and can only reload a model as a whole, from tensors that it keeps
    until a layer is complete (vllm 0.29.0, model_executor/model_loader/reload/layerwise.py).
    """

    rank: int  # in its engine
    device: torch.device
    model_runner: Any
    weights_version = 0  # of the last complete transfer, as the trainer counts them

    def join_weight_group(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        """Join the trainer's broadcast group as rank ``rank_offset`` + this worker's rank in its engine."""
        rank = rank_offset + self.rank
        self._broadcast = transports.join(host, port, rank, world_size, self.device)

    def receive_weights(self, buckets: list[Bucket], sync_checksum: bool, version: int) -> Receipt | None:
        """Take every broadcast bucket in turn and load it. ``buckets`` lists the whole model, in wire order.

        At most two buckets are held at a time, and on CPU also the layers that are not complete. Returns what arrived
        if ``sync_checksum`` asks for it.
        """
        incoming = self._incoming(buckets)
        arrivals = Arrivals(self.model_runner.get_model()) if sync_checksum else None
        self._load(incoming, arrivals)
        for _ in incoming:  # a loader that stops early must not leave the trainer waiting
            pass
        self.weights_version = version
        return arrivals.receipt() if arrivals else None

    def receive_bucket(
        self, bucket: Bucket, handles: dict[str, bytes], index: int, count: int, sync_checksum: bool, version: int
    ) -> Receipt | None:
        """Take bucket ``index`` of ``count`` from the memory that a trainer process on this GPU, or host, has filled.

        The bucket has been read when this returns. After the last one the memory is released, and what arrived is
        returned if ``sync_checksum`` asks for it.
        """
        if index == 0:
            self._sync = _ColocatedSync(Arrivals(self.model_runner.get_model()) if sync_checksum else None)
        sync = self._sync
        memory = memory_of(self.device)
        if memory not in handles:
            raise RuntimeError(
                f"No trainer process shares weights with an engine on {memory}, only on {sorted(handles)}."
            )
        handle = handles[memory]
        if handle not in sync.mapped:
            sync.mapped[handle] = open_shared(handle, self.device)
        weights = unpack(bucket, sync.mapped[handle])
        if self.device.type == "cpu":
            sync.kept += [(name, tensor.clone()) for name, tensor in weights]
        else:
            self._load(weights, sync.arrivals)
        if index + 1 < count:
            return None
        del self._sync
        if self.device.type == "cpu":
            self._load(sync.kept, sync.arrivals)
        self.weights_version = version
        return sync.arrivals.receipt() if sync.arrivals else None

    def _is_news(self, record: logging.LogRecord) -> bool:
        """False if a record says only that nothing arrived for modules without a weight of their own: rotary tables,
        and a head tied to the embedding."""
        if record.msg != "%s: Failed to load weights" or not isinstance(record.args, tuple):
            return True
        tied = getattr(self.model_runner.model_config.hf_config, "tie_word_embeddings", False)
        return not str(record.args[0]).endswith(("RotaryEmbedding", "ParallelLMHead") if tied else "RotaryEmbedding")

    def _incoming(self, buckets: list[Bucket]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in buckets:
            buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE, device=self.device)
            self._broadcast(buffer)(lambda: None)
            yield from unpack(bucket, buffer)

    def _load(self, weights: Iterable[tuple[str, torch.Tensor]], arrivals: Arrivals | None) -> None:
        with arrivals.loading() if arrivals else nullcontext():
            weights = arrivals.watch(weights) if arrivals else weights
            if self.device.type != "cpu":
                self.model_runner.get_model().load_weights(weights)
                torch.cuda.synchronize()
                return
            _RELOAD_LOG.addFilter(self._is_news)  # no effect from the second time on
            self.model_runner.reload_weights(weights_iterator=weights)
            for module in self.model_runner.get_model().modules():
                _pack(module)


def _pack(module: torch.nn.Module) -> None:
    """Make what vLLM's CPU kernels read of a module's weights, where a reload leaves it out.

    Logits come from a packed copy of the head's weight. A head tied to the embedding gets no weight of its own in a
    reload, which updates the shared weight and leaves the copy stale. Experts are packed in place, at the first load
    alone: after another the kernels would read plain weights as packed ones. Can go once a reload does both (vllm
    0.29.0 to 0.32.0, model_executor/model_loader/reload/layerwise.py, _layerwise_process; model_executor/layers/
    fused_moe/unquantized_fused_moe_method.py, _setup_kernel).
    """
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "moe_kernel", None)
    if method is not None and hasattr(module, "tie_weights"):  # vLLM's ParallelLMHead
        method.process_weights_after_loading(module)
    elif kernel is not None and hasattr(module, "w13_weight"):  # its RoutedExperts
        kernel.fused_experts.process_weights_after_loading(module)
