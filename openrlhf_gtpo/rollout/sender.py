"""The trainer's side of the weight transfer: buckets of full tensors from rank 0 to every vLLM engine."""

from collections.abc import Iterator, Sequence
from typing import Any

import ray
import torch

from openrlhf_gtpo.rollout import broadcast_group
from openrlhf_gtpo.rollout.broadcast_group import Finish
from openrlhf_gtpo.rollout.buckets import ParameterMeta, pack, plan_buckets


class WeightSender:
    """Rank 0 of the group that joins the trainer with ``engines`` (Ray handles of :class:`RolloutActor`).

    Args:
        engines: one handle per vLLM engine.
        tensor_parallel_size: workers in each engine.
        host: an address of this process that the engines can reach.
        device: where this process's tensors live.
        bucket_bytes: size of one broadcast.
    """

    def __init__(
        self, engines: Sequence[Any], tensor_parallel_size: int, host: str, device: torch.device, bucket_bytes: int
    ) -> None:
        self._engines = list(engines)
        self._device = device
        self._bucket_bytes = bucket_bytes
        world_size = len(self._engines) * tensor_parallel_size + 1
        listener = broadcast_group.listen()
        port = int(listener.getsockname()[1])
        joining = [
            engine.join_weight_group.remote(host, port, 1 + i * tensor_parallel_size, world_size)
            for i, engine in enumerate(self._engines)
        ]
        self._group = broadcast_group.join(host, port, 0, world_size, device, listener)
        ray.get(joining)

    def send(self, parameters: Sequence[ParameterMeta], tensors: Iterator[torch.Tensor]) -> None:
        """Send the whole model: ``tensors`` yields one full tensor for every entry of ``parameters``, in order.

        Raises:
            ray.exceptions.RayError: an engine failed or died; what it raised is passed on.
        """
        plan = plan_buckets(parameters, self._bucket_bytes)
        wire_plan = [[(p.name, p.shape) for p in bucket] for bucket in plan]
        receiving = [engine.receive_weights.remote(wire_plan) for engine in self._engines]

        def pass_on_failures() -> None:
            # An engine that answers before it has everything has failed, and nobody else would notice.
            answered, _ = ray.wait(receiving, num_returns=len(receiving), timeout=0)
            ray.get(answered)

        under_way: list[Finish] = []
        for bucket in plan:
            buffer = pack(bucket, tensors, self._device)  # gathers this bucket while the previous one is on its way
            if under_way:
                under_way.pop()(pass_on_failures)
            under_way.append(self._group.start(buffer))
        if under_way:
            under_way.pop()(pass_on_failures)
        ray.get(receiving)
