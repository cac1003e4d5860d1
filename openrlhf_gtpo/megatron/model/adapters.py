"""Low-rank adapters beside the products of Megatron's decoder layers.

A product here is one matrix, but up to three of Hugging Face's: QKV, gate and up. Each of these has its own adapter, W
+ scale · B·A, so that a run equals one with PEFT and PEFT's folder format fits. B is sharded along the rows of a
column-parallel product, A along the columns of a row-parallel one. The other factor is on every rank. Ranks therefore
exchange tensors as narrow as the adapters. Under sequence parallelism each rank has only its tokens' part of the other
factor's gradient, and Megatron sums it over the TP group.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.lora.init import initial_a
from openrlhf_gtpo.lora.merge import merge
from openrlhf_gtpo.megatron.model.conversion import Stored
from openrlhf_gtpo.megatron.model.layers import rms_norm
from openrlhf_gtpo.platform.agreement import all_gather_objects

_SUFFIX = "_adapters"  # suffix of a product's name, only in Megatron's names of adapters and their parameters


def is_adapter(name: str) -> bool:
    """True for Megatron's names of adapters' parameters."""
    return f"{_SUFFIX}." in name


class Adapters(torch.nn.Module):
    """The adapters of one product, or this rank's parts of them: ``q_proj_A`` (r, in), ``q_proj_B`` (out, r), ….

    Args:
        linear: the product.
        stored: its weight in a checkpoint, a tensor for each of Hugging Face's matrices.
        seed: the run's seed. A is drawn whole and then cut, so that every layout starts with the same.
    """

    def __init__(self, linear: torch.nn.Module, stored: Stored, options: LoraOptions, seed: int) -> None:
        super().__init__()
        self.names, self.enabled = stored.names, True
        self._sizes, self._groups, self._scale = stored.sizes, stored.groups, options.scale
        self._is_column = is_column = stored.cut == 0  # TP shards the product's outputs; otherwise its inputs
        self._config: Any = linear.config
        tp, rank = parallel_state.get_tensor_model_parallel_world_size(), self._tp_rank
        weight: Any = linear.weight
        inputs = weight.shape[1]
        for (name, part), size in zip(self._parts(), self._sizes, strict=True):
            if not options.adapts(name.removesuffix(".weight")):
                continue
            a = initial_a(options.rank, inputs if is_column else inputs * tp, name, seed)
            a = a if is_column else a.split(inputs, dim=1)[rank].contiguous()
            self._add(f"{part}_A", a.to(weight), None if is_column else 1)
            self._add(f"{part}_B", weight.new_zeros(self._groups * size, options.rank), 0 if is_column else None)

    def _add(self, name: str, values: Tensor, sharded_dim: int | None) -> None:
        parameter: Any = torch.nn.Parameter(values)
        set_tensor_model_parallel_attributes(
            parameter, sharded_dim is not None, -1 if sharded_dim is None else sharded_dim, 1
        )
        parameter.sequence_parallel = self._config.sequence_parallel and sharded_dim is None
        self.register_parameter(name, parameter)

    def _parts(self) -> Iterator[tuple[str, str]]:
        """Names of the weights, such as model.layers.0.self_attn.q_proj.weight, and their parts such as q_proj."""
        return ((name, name.split(".")[-2]) for name in self.names)

    @property
    def _tp_rank(self) -> int:
        return parallel_state.get_tensor_model_parallel_rank()

    def pairs(self) -> Iterator[tuple[str, Any, Any]]:
        """Return Hugging Face's name of each weight with an adapter, and this rank's part of its A and B."""
        for name, part in self._parts():
            if hasattr(self, f"{part}_A"):
                yield name, getattr(self, f"{part}_A"), getattr(self, f"{part}_B")

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the product's input on this rank, (s, b, in), to the term to add to its output, (s, b, out)."""
        pairs = {name: (a, b) for name, a, b in self.pairs()}
        narrow = F.linear(hidden, torch.cat([a for a, _ in pairs.values()])) * self._scale
        narrow = self._exchange(narrow)
        each = dict(zip(pairs, narrow.chunk(len(pairs), dim=-1), strict=True))
        outputs = []
        for name, size in zip(self.names, self._sizes, strict=True):
            if name in pairs:
                outputs.append(F.linear(each[name], pairs[name][1]).unflatten(-1, (self._groups, size)))
            else:
                outputs.append(narrow.new_zeros(*narrow.shape[:-1], self._groups, size))
        return torch.cat(outputs, dim=-1).flatten(-2)

    def _exchange(self, narrow: Tensor) -> Tensor:
        """The input of this rank's B: the products with A, over all inputs, of all tokens whose outputs it has."""
        if self._config.sequence_parallel:
            column, row = gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region
        else:
            column, row = copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
        return column(narrow) if self._is_column else row(narrow)

    def add_to(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> Any:
        """Add the adapters' output to the output of the product ``linear``; its forward hook."""
        if not self.enabled:
            return output
        hidden = inputs[0]
        if self._is_column:
            # Normalize again, because the product's output does not contain its own normalized input.
            norm = rms_norm if self._config.portable_layers else _fused_norm
            hidden = norm(hidden, linear.layer_norm_weight, self._config.layernorm_epsilon)
        return output[0] + self(hidden), output[1]

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the product's weight (O, I) with its adapters merged."""
        pairs = {name: (a, b) for name, a, b in self.pairs()}
        parts = []
        for name, part in zip(
            self.names, weight.unflatten(0, (self._groups, -1)).split(self._sizes, dim=1), strict=True
        ):
            matrix = part.flatten(0, 1)
            if name in pairs:
                place = self._tp_rank * matrix.shape[0 if self._is_column else 1]
                offset = (place, 0) if self._is_column else (0, place)
                matrix = merge(matrix, *pairs[name], self._scale, name, offset)
            parts.append(matrix.view(part.shape))
        return torch.cat(parts, dim=1).flatten(0, 1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """Describe the shards: Megatron's default treats all parameters of an unknown module as replicated."""
        assert metadata is not None
        dims = {n: p.partition_dim for n, p in self.named_parameters() if p.tensor_model_parallel}
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            dims,
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=metadata["dp_cp_group"],
        )


def _fused_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`rms_norm` with Transformer Engine's rounding, without float32 copies for the backward pass."""
    return F.rms_norm(hidden, weight.shape, weight, eps)


def add_adapters(stage: Any, stored: dict[str, tuple[Stored, ...]], options: LoraOptions, seed: int) -> list[str]:
    """Freeze ``stage``, give its products adapters, and return Hugging Face's names of the modules that have one.

    Args:
        stored: the checkpoint's tensors for the stage's parameters.
    """
    adapted = []
    stage.requires_grad_(False)
    for name, (weight,) in stored.items():
        path, _, product = name.removesuffix(".weight").rpartition(".")
        if not name.endswith(".weight") or not product.startswith("linear_"):
            continue
        if not any(options.adapts(matrix.removesuffix(".weight")) for matrix in weight.names):
            continue
        parent = stage.get_submodule(path)
        linear = getattr(parent, product)
        adapters = Adapters(linear, weight, options, seed)
        parent.add_module(product + _SUFFIX, adapters)
        linear.register_forward_hook(adapters.add_to)
        adapted += [matrix.removesuffix(".weight") for matrix, _, _ in adapters.pairs()]
    if stage.pre_process:
        # A recomputed layer gets gradients only if its input requires them, but a frozen embedding's output does not.
        stage.embedding.register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    parameters, beside = dict(stage.named_parameters()), adapters_of(stage)
    merged = {
        id(factor) for name in beside.keys() & parameters for _, *pair in beside[name].pairs() for factor in pair
    }
    for name, parameter in parameters.items():
        assert not parameter.requires_grad or id(parameter) in merged, f"{name} would be trained for nobody"
    return adapted


def adapters_of(stage: torch.nn.Module) -> dict[str, Adapters]:
    """Return a stage's adapters by the names of their weights."""
    modules = ((name, module) for name, module in stage.named_modules() if isinstance(module, Adapters))
    return {f"{name.removesuffix(_SUFFIX)}.weight": module for name, module in modules}


@torch.no_grad()
def full_adapters(stage: torch.nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Gather A (r, in) and B (out, r) of the whole model on the CPU of each rank of a replica, by Hugging Face's
    module names, such as model.layers.0.mlp.up_proj. Collective."""
    own = {}
    for adapters in adapters_of(stage).values():
        for name, a, b in adapters.pairs():
            own[name.removesuffix(".weight")] = _whole(a).cpu(), _whole(b).cpu()
    stages = all_gather_objects(own, parallel_state.get_pipeline_model_parallel_group())
    return {name: pair for pairs in stages for name, pair in pairs.items()}


def _whole(parameter: Any) -> Tensor:
    if not parameter.tensor_model_parallel:
        return parameter.detach()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(parameter) for _ in range(group.size())]
    torch.distributed.all_gather(parts, parameter.detach(), group=group)
    return torch.cat(parts, dim=parameter.partition_dim)
