"""A sharded model as (Hugging Face name, full tensor) pairs, gathered over TP, EP and PP a bucket at a time."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace

import torch
from megatron.core import parallel_state
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.adapters import adapters_of, is_adapter
from openrlhf_gtpo.megatron.model.bridge import EXPERTS
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import device
from openrlhf_gtpo.platform.agreement import all_gather_objects


@dataclass(frozen=True)
class _Parameter:
    """One Megatron parameter of a pipeline stage, and what other ranks have in its place.

    Fields:
        local_name: its name within its stage.
        names: its name within the whole model; for an expert, the names that all expert-parallel ranks have here.
        shape: of the shard.
        partition_dim: the dimension along which TP shards it; None if every tensor-parallel rank has all of it.
        hf: Hugging Face names and full shapes of the tensors that all of these become.
    """

    stage: int
    local_name: str
    names: tuple[str, ...]
    shape: torch.Size
    partition_dim: int | None
    hf: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def is_expert(self) -> bool:
        return EXPERTS in self.local_name

    @property
    def is_split(self) -> bool:
        """True if each rank has a part of its values."""
        return self.partition_dim is not None or len(self.names) > 1

    @property
    def full_numel(self) -> int:
        return sum(math.prod(shape) for _, shape in self.hf)


class FullWeights:
    """The whole model on every rank of a replica, under Hugging Face's names; a tied head is not repeated. Each rank
    merges its parts of adapters into its parts of the weights before they are gathered.

    Collective: all ranks of a replica construct it, and fill or iterate over it, together; if replicas share the
    experts, so do all ranks of those replicas.

    Args:
        bucket_bytes: how much is gathered at once; a larger parameter is a bucket of its own.
        read: returns a parameter's values on this rank; by default those that the model computes with, so that an FP8
            primary weight comes out rounded.

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
        self.buckets = [[entry for parameter in part for entry in parameter.hf] for part in self._parts]

    @torch.no_grad()
    def fill(self, index: int, buffer: Tensor) -> None:
        """Gather bucket ``index`` into the beginning of the flat ``buffer``, on every rank of the replica."""
        part = self._parts[index]
        full = buffer[: sum(parameter.full_numel for parameter in part)]
        if part[0].stage == parallel_state.get_pipeline_model_parallel_rank():
            pieces: list[Tensor] = []
            for parameter, shards in zip(part, self._shards(part), strict=True):
                pieces += [tensor.reshape(-1) for _, tensor in self._convert(parameter, shards)]
            torch.cat(pieces, out=full)
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
        names = self._model.bridge._weight_name_mapping_mcore_local_to_global(self._model.stage, consider_ep=False)
        described = [self._describe(name, names[name], parameter) for name, parameter in self._parameters.items()]
        seen: set[str] = set()
        plan = []
        for parameter in chain.from_iterable(all_gather_objects(described, self._pp)):
            if not {name for name, _ in parameter.hf} <= seen:  # a tied head comes again from the last stage
                plan.append(parameter)
                seen.update(name for name, _ in parameter.hf)
        return plan

    def _describe(self, local_name: str, name: str, parameter: Tensor) -> _Parameter:
        """Describe a parameter of this rank. A conversion on the meta device gives the names and full shapes of the
        Hugging Face tensors that it becomes, together with other ranks' parts."""
        sharded = bool(getattr(parameter, "tensor_model_parallel", False)) and self._tp.size() > 1
        described = _Parameter(
            stage=parallel_state.get_pipeline_model_parallel_rank(),
            local_name=local_name,
            names=self._expert_names(name) if EXPERTS in name else (name,),
            shape=parameter.shape,
            partition_dim=parameter.partition_dim if sharded else None,  # type: ignore[attr-defined]
            hf=(),
        )
        count = len(described.names) * (self._tp.size() if sharded else 1)
        shards = [torch.empty(parameter.shape, device="meta") for _ in range(count)]
        return replace(described, hf=tuple((n, tuple(tensor.shape)) for n, tensor in self._convert(described, shards)))

    def _expert_names(self, name: str) -> tuple[str, ...]:
        """The names that a local expert of this rank and its counterparts on all expert-parallel ranks have."""
        ranks = parallel_state.get_expert_model_parallel_world_size()
        local_experts = self._model.config.num_moe_experts // ranks
        prefix, local = name.split(".weight")
        return tuple(f"{prefix}.weight{rank * local_experts + int(local)}" for rank in range(ranks))

    def _convert(self, parameter: _Parameter, shards: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Convert shards, ordered by EP rank and then by TP rank, to Hugging Face tensors."""
        bridge = self._model.bridge
        num_shards = len(shards) // len(parameter.names)
        for i, name in enumerate(parameter.names):
            merged = shards[i * num_shards]
            if num_shards > 1:
                like = SimpleNamespace(tensor_model_parallel=True, partition_dim=parameter.partition_dim)
                merged = bridge._weight_merge_across_tp(name, shards[i * num_shards : (i + 1) * num_shards], like)
            yield from zip(*bridge._weight_to_hf_format(name, merged), strict=True)

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
        """Every rank's part of each parameter, or the parameter alone if all ranks have the same."""
        dense = self._all_gather([p for p in bucket if p.is_split and not p.is_expert], self._tp)
        experts = self._all_gather([p for p in bucket if p.is_split and p.is_expert], self._experts)
        for parameter in bucket:
            if parameter.is_split:
                yield next(experts if parameter.is_expert else dense)
            else:
                yield [self._values(parameter)]

    def _values(self, parameter: _Parameter) -> Tensor:
        """This rank's part of a parameter."""
        values = self._read(self._parameters[parameter.local_name])
        adapters = self._adapters.get(parameter.local_name)
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
