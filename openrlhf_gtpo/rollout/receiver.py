"""The vLLM side of the weight transfer: a worker extension that takes buckets off the wire into the model."""

from collections.abc import Iterator
from typing import Any

import torch

from openrlhf_gtpo.rollout import broadcast_group
from openrlhf_gtpo.rollout.buckets import WIRE_DTYPE, ParameterMeta, unpack


class WeightReceiver:
    """Mixed into vLLM's worker (``worker_extension_cls``), which owns ``device`` and ``model_runner``."""

    device: torch.device
    model_runner: Any

    def join_weight_group(self, host: str, port: int, rank_offset: int, world_size: int) -> None:
        """Join the trainer's broadcast group as rank ``rank_offset`` + this worker's rank in its engine."""
        rank = rank_offset + torch.distributed.get_rank()
        self._weight_group = broadcast_group.join(host, port, rank, world_size, self.device)

    def receive_weights(self, buckets: list[list[tuple[str, tuple[int, ...]]]]) -> None:
        """Receive every bucket in turn and load it. ``buckets`` lists (name, shape) of the whole model, in wire order.

        On CPU vLLM repacks linear weights after loading and can only reload a model as a whole, so both platforms
        stream one model through one call; at most one bucket is held at a time.
        """
        plan = [[ParameterMeta(name, tuple(shape)) for name, shape in bucket] for bucket in buckets]
        if self.device.type == "cpu":
            self.model_runner.reload_weights(weights_iterator=self._incoming(plan))
            self._pack_heads_again()
        else:
            self.model_runner.model.load_weights(weights=self._incoming(plan))
            torch.cuda.synchronize()

    def _pack_heads_again(self) -> None:
        """On CPU vLLM computes logits from a packed copy of the head's weight. A head tied to the embedding gets no
        weight of its own in a reload, which updates the shared weight and leaves the copy stale (vLLM 0.29)."""
        for module in self.model_runner.get_model().modules():
            if hasattr(module, "tie_weights"):  # vLLM's ParallelLMHead
                module.quant_method.process_weights_after_loading(module)

    def _incoming(self, plan: list[list[ParameterMeta]]) -> Iterator[tuple[str, torch.Tensor]]:
        for bucket in plan:
            buffer = torch.empty(sum(p.numel for p in bucket), dtype=WIRE_DTYPE, device=self.device)
            self._weight_group.start(buffer)(lambda: None)
            yield from unpack(bucket, buffer)
