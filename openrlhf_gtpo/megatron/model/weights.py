"""A sharded model as (Hugging Face name, full tensor) pairs, gathered over TP, EP and PP a bucket at a time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.adapters import adapters_of, is_adapter
from openrlhf_gtpo.megatron.model.conversion import EXPERTS, Stored
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import device
from openrlhf_gtpo.platform.agreement import all_gather_objects


@dataclass(frozen=True)
class _Parameter:
    """One Megatron parameter of a pipeline stage, and its counterparts on other ranks.

    Fields:
        name: its name within its stage.
        shape: the shard's shape.
        stored: the resulting tensors; for an expert, of all expert-parallel ranks.
    """

    stage: int
    name: str
    shape: torch.Size
    stored: tuple[Stored, ...]

    @property
    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Hugging Face's names and full shapes of all of them."""
        return [entry for stored in self.stored for entry in zip(stored.names, stored.shapes, strict=True)]

    @property
    def is_expert(self) -> bool:
        return EXPERTS in self.name

    @property
    def is_split(self) -> bool:
        """True if each rank has a part of its values."""
        return len(self.stored) > 1 or (self.stored[0].cut is not None and self.stored[0].ranks > 1)

    @property
    def full_numel(self) -> int:
        return sum(stored.numel for stored in self.stored)


class FullWeights:
    """The whole model on every rank of a replica, under Hugging Face's names, without a tied head. Each rank merges
    its parts of adapters into its parts of the weights before they are gathered.

    Collective: all ranks of a replica construct it, and fill or iterate over it, together; if replicas share the
    experts, so do all ranks of those replicas.

    Args:
        bucket_bytes: maximum bytes to gather at once; a larger parameter is a bucket of its own.
        read: returns a parameter's values on this rank; by default the values that the model computes with, so that an
            FP8 primary weight is rounded.

    Fields:
        buckets: for each bucket, the (name, full shape) of the tensors that are gathered at once.
    """

    def __init__(
        self, model: LoadedModel, bucket_bytes: int, read: Callable[[Tensor], Tensor] = in_high_precision
    ) -> None:
        self._model = model
        self._read = read
        self._parameters = {name: p for name, p in model.stage.named_parameters() if not is_adapter(name)}
        self._adapters = adapters_of(model.stage)
        self._tp = parallel_state.get_tensor_model_parallel_group()
        # TP ranks within EP ranks. Experts are sharded over TP like everything else.
        self._experts = parallel_state.get_expert_tensor_and_model_parallel_group()
        self._pp = parallel_state.get_pipeline_model_parallel_group()
        self._parts = list(self._cut(self._plan(), bucket_bytes))
        self.buckets = [[entry for parameter in part for entry in parameter.tensors] for part in self._parts]

    @torch.no_grad()
    def fill(self, index: int, buffer: Tensor) -> None:
        """Gather bucket ``index`` into the beginning of the flat ``buffer``, on every rank of the replica."""
        part = self._parts[index]
        full = buffer[: sum(parameter.full_numel for parameter in part)]
        if part[0].stage == parallel_state.get_pipeline_model_parallel_rank():
            rest = full
            for parameter, shards in zip(part, self._shards(part), strict=True):
                # Shards are ordered by EP rank and then by TP rank.
                count = len(shards) // len(parameter.stored)
                for i, stored in enumerate(parameter.stored):
                    tensors, rest = rest[: stored.numel], rest[stored.numel :]
                    stored.collect(shards[i * count : (i + 1) * count], tensors)
        if self._pp.size() > 1:
            source = torch.distributed.get_global_rank(self._pp, part[0].stage)
            torch.distributed.broadcast(full, src=source, group=self._pp)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, full tensor) in the model's dtype; collective, one bucket at a time."""
        for index, bucket in enumerate(self.buckets):
            sizes = [math.prod(shape) for _, shape in bucket]
            full = torch.empty(sum(sizes), dtype=self._model.options.dtype, device=device())
            self.fill(index, full)
            for (name, shape), piece in zip(bucket, full.split(sizes), strict=True):
                yield name, piece.view(shape)

    def _plan(self) -> list[_Parameter]:
        """The parameters of all stages, the first stage's first."""
        stage = parallel_state.get_pipeline_model_parallel_rank()
        own = [_Parameter(stage, name, p.shape, self._model.stored[name]) for name, p in self._parameters.items()]
        plan: dict[str, _Parameter] = {}  # keyed by the first tensor, because the last stage repeats a tied head
        for parameter in chain.from_iterable(all_gather_objects(own, self._pp)):
            plan.setdefault(parameter.stored[0].names[0], parameter)
        return list(plan.values())

    def _cut(self, plan: list[_Parameter], bucket_bytes: int) -> Iterator[list[_Parameter]]:
        """Yield buckets of consecutive parameters of one stage, each of at most ``bucket_bytes`` in full."""
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

    def _shards(self, bucket: list[_Parameter]) -> Iterator[list[Tensor]]:
        """Every rank's part of each parameter, or only the parameter itself if all ranks have the same."""
        dense = self._all_gather([p for p in bucket if p.is_split and not p.is_expert], self._tp)
        experts = self._all_gather([p for p in bucket if p.is_split and p.is_expert], self._experts)
        for parameter in bucket:
            if parameter.is_split:
                yield next(experts if parameter.is_expert else dense)
            else:
                yield [self._values(parameter)]

    def _values(self, parameter: _Parameter) -> Tensor:
        """This rank's part of a parameter."""
        values = self._read(self._parameters[parameter.name])
        adapters = self._adapters.get(parameter.name)
        return values if adapters is None else adapters.merged(values)

    def _all_gather(
        self, parameters: list[_Parameter], group: torch.distributed.ProcessGroup
    ) -> Iterator[list[Tensor]]:
        """Gather every rank's part of each parameter over ``group``, in one collective."""
        if not parameters:
            return
        flat = torch.cat([self._values(parameter).reshape(-1) for parameter in parameters])
        gathered = [torch.empty_like(flat) for _ in range(group.size())]
        torch.distributed.all_gather(gathered, flat, group=group)
        ranks = [rank_values.split([parameter.shape.numel() for parameter in parameters]) for rank_values in gathered]
        for parameter, parts in zip(parameters, zip(*ranks, strict=True), strict=True):
            yield [part.view(parameter.shape) for part in parts]
