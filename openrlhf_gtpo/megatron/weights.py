"""A sharded model as (Hugging Face name, full tensor) pairs, gathered over TP and PP a bucket at a time."""

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_gtpo.megatron.host import device
from openrlhf_gtpo.megatron.model import LoadedModel


@dataclass(frozen=True)
class _Parameter:
    """One Megatron parameter of a pipeline stage, the same on every tensor-parallel rank but for its values.

    Fields:
        local_name, name: within its stage, and within the whole model.
        shape: of the shard.
        partition_dim: along which it is sharded; None where every rank has all of it.
        hf: Hugging Face names and full shapes that it becomes.
    """

    stage: int
    local_name: str
    name: str
    shape: torch.Size
    partition_dim: int | None
    hf: tuple[tuple[str, torch.Size], ...]

    @property
    def full_numel(self) -> int:
        return sum(shape.numel() for _, shape in self.hf)


class FullWeights:
    """The whole model for everyone who asks on every rank of a replica, in the order and names of Hugging Face.

    A tied head is not repeated. Collective: all ranks of a replica make it, and iterate over it, together.

    Args:
        bucket_bytes: about how much is gathered at once; a larger parameter is a bucket of its own.
    """

    def __init__(self, model: LoadedModel, bucket_bytes: int) -> None:
        self._model = model
        self._parameters = dict(model.stage.named_parameters())
        self._tp = parallel_state.get_tensor_model_parallel_group()
        self._pp = parallel_state.get_pipeline_model_parallel_group()
        self._buckets = list(self._cut(self._plan(), bucket_bytes))

    @property
    def shapes(self) -> list[tuple[str, torch.Size]]:
        """Names and full shapes, in the order of :meth:`tensors`."""
        return [entry for bucket in self._buckets for parameter in bucket for entry in parameter.hf]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, full tensor) in the model's dtype; a tensor is valid until the next but one bucket is gathered."""
        for bucket in self._buckets:
            flat = self._gather(bucket)
            entries = [entry for parameter in bucket for entry in parameter.hf]
            pieces = flat.split([shape.numel() for _, shape in entries])
            for (name, shape), piece in zip(entries, pieces, strict=True):
                yield name, piece.view(shape)

    def _plan(self) -> list[_Parameter]:
        """All stages' parameters, the first stage's first."""
        names = self._model.bridge._weight_name_mapping_mcore_local_to_global(self._model.stage, consider_ep=False)
        mine = [self._describe(name, names[name], parameter) for name, parameter in self._parameters.items()]
        stages: list[Any] = [None] * self._pp.size()
        torch.distributed.all_gather_object(stages, mine, group=self._pp)
        seen: set[str] = set()
        plan = []
        for parameter in (parameter for stage in stages for parameter in stage):
            if not {name for name, _ in parameter.hf} <= seen:  # a tied head comes again from the last stage
                plan.append(parameter)
                seen.update(name for name, _ in parameter.hf)
        return plan

    def _describe(self, local_name: str, name: str, parameter: Tensor) -> _Parameter:
        sharded = bool(getattr(parameter, "tensor_model_parallel", False)) and self._tp.size() > 1
        partition_dim = parameter.partition_dim if sharded else None  # type: ignore[attr-defined]
        shape = parameter.shape
        described = _Parameter(parallel_state.get_pipeline_model_parallel_rank(), local_name, name, shape, None, ())
        shards = [torch.empty(shape, device="meta") for _ in range(self._tp.size() if sharded else 1)]
        hf = tuple((n, t.shape) for n, t in self._convert(described, shards, partition_dim))
        return _Parameter(described.stage, local_name, name, shape, partition_dim, hf)

    def _convert(
        self, parameter: _Parameter, shards: list[Tensor], partition_dim: int | None
    ) -> list[tuple[str, Tensor]]:
        """Shards in rank order to Hugging Face tensors."""
        bridge = self._model.bridge
        merged = shards[0]
        if len(shards) > 1:
            like = SimpleNamespace(tensor_model_parallel=True, partition_dim=partition_dim)
            merged = bridge._weight_merge_across_tp(parameter.name, shards, like)
        return list(zip(*bridge._weight_to_hf_format(parameter.name, merged), strict=True))

    def _cut(self, plan: list[_Parameter], bucket_bytes: int) -> Iterator[list[_Parameter]]:
        """Consecutive parameters of one stage, at most ``bucket_bytes`` in full."""
        bucket: list[_Parameter] = []
        size = 0
        for parameter in plan:
            bytes_ = parameter.full_numel * self._model.options.dtype.itemsize
            if bucket and (size + bytes_ > bucket_bytes or parameter.stage != bucket[0].stage):
                yield bucket
                bucket, size = [], 0
            bucket.append(parameter)
            size += bytes_
        if bucket:
            yield bucket

    @torch.no_grad()
    def _gather(self, bucket: list[_Parameter]) -> Tensor:
        """The bucket's full tensors in one flat buffer, on every rank of the replica."""
        full = torch.empty(sum(p.full_numel for p in bucket), dtype=self._model.options.dtype, device=device())
        if bucket[0].stage == parallel_state.get_pipeline_model_parallel_rank():
            parts: list[Tensor] = []
            for parameter, shards in zip(bucket, self._shards(bucket), strict=True):
                parts += [part.reshape(-1) for _, part in self._convert(parameter, shards, parameter.partition_dim)]
            torch.cat(parts, out=full)
        if self._pp.size() > 1:
            source = torch.distributed.get_global_rank(self._pp, bucket[0].stage)
            torch.distributed.broadcast(full, src=source, group=self._pp)
        return full

    def _shards(self, bucket: list[_Parameter]) -> Iterator[list[Tensor]]:
        """Every rank's shard of each parameter, or the parameter alone where it is not sharded; one collective."""
        local = [self._parameters[parameter.local_name].detach() for parameter in bucket]
        split = [t for t, parameter in zip(local, bucket, strict=True) if parameter.partition_dim is not None]
        ranks: list[list[Tensor]] = []
        if split:
            flat = torch.cat([tensor.reshape(-1) for tensor in split])
            gathered = [torch.empty_like(flat) for _ in range(self._tp.size())]
            torch.distributed.all_gather(gathered, flat, group=self._tp)
            ranks = [list(one.split([tensor.numel() for tensor in split])) for one in gathered]
        for tensor, parameter in zip(local, bucket, strict=True):
            whole = parameter.partition_dim is None
            yield [tensor] if whole else [rank.pop(0).view(parameter.shape) for rank in ranks]
