"""Megatron's parameters as the tensors of a checkpoint, in both directions, by the tables of ``megatron/families.py``.

A rank's part of a matrix is a window into a tensor, and some rows of its parameter are a view with the same elements.
Reading copies windows into views, sending copies views into windows. Neither makes a whole copy in between.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.families import FAMILIES, Weight
from openrlhf_gtpo.platform.files import weight_files

EXPERTS = ".mlp.experts.linear_fc"  # only in Megatron's names of expert weights
_NAME = re.compile(r"(?:decoder\.layers\.(\d+)\.)?(.*?)(\d*)")  # a layer, a name in the table, an expert


@dataclass(frozen=True)
class Stored:
    """The checkpoint's tensors that make up a parameter, and the position of each tensor-parallel rank's part.

    Fields:
        names, shapes: the tensors', as in Hugging Face.
        cut: the dimension along which TP cuts each matrix; None if every rank has all of it.
        ranks: the tensor-parallel size.
        groups, sizes: a rank's rows are ``groups`` groups, each with ``sizes`` rows of the matrices.
        starts: the first row of every matrix in its tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    cut: int | None
    ranks: int
    groups: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(
        cls, weight: Weight, names: tuple[str, ...], shape: Sequence[int], config: Any, vocabulary: int
    ) -> "Stored":
        """Describe a parameter with ``shape`` on each rank, made of the tensors ``names``.

        Args:
            config: Megatron's configuration, for the heads.
            vocabulary: the vocabulary's size, without padding.
        """
        ranks, groups = config.tensor_model_parallel_size, 1
        sizes: tuple[int, ...] = (shape[0],)
        if weight.rows == "qkv":
            groups, queries = config.num_query_groups // ranks, config.num_attention_heads // config.num_query_groups
            sizes = (queries * config.kv_channels, config.kv_channels, config.kv_channels)
        elif weight.rows == "gate_up":
            sizes = (shape[0] // 2,) * 2
        rows = [groups * size * (ranks if weight.cut == 0 else 1) for size in sizes]
        if weight.rows == "vocabulary":
            rows = [vocabulary]
        starts = (0,) * len(rows)
        if weight.is_stacked:
            starts, rows = tuple(accumulate(rows, initial=0))[:-1], [sum(rows)]
        columns = [size * ranks for size in shape[1:]] if weight.cut == 1 else shape[1:]
        return cls(names, tuple((count, *columns) for count in rows), weight.cut, ranks, groups, sizes, starts)

    @property
    def numel(self) -> int:
        """Elements of all tensors."""
        return sum(math.prod(shape) for shape in self.shapes)

    def places(self, shard: Tensor, rank: int) -> Iterator[tuple[str, tuple[slice, ...], Tensor]]:
        """For each of ``rank``'s matrices: the tensor's name, the window into it, and the view (groups, rows, …) of
        ``shard``, the rank's parameter. The window's first dimension is groups × rows. Neither includes padding."""
        views = shard.unflatten(0, (self.groups, -1)).split(self.sizes, dim=1)
        for i, (start, size, view) in enumerate(zip(self.starts, self.sizes, views, strict=True)):
            tensor = min(i, len(self.names) - 1)  # the only one, if it has all matrices
            rows = self.groups * size
            first = start + (rank * rows if self.cut == 0 else 0)
            last = min(first + rows, self.shapes[tensor][0])
            window = [slice(first, last)]
            if self.cut == 1:
                window.append(slice(rank * shard.shape[1], (rank + 1) * shard.shape[1]))
            if last > first:
                yield self.names[tensor], tuple(window), view[:, : last - first]

    def collect(self, shards: Sequence[Tensor], full: Tensor) -> None:
        """Copy every tensor-parallel rank's shard, or the only one, into ``full``, the flat tensors in order."""
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = zip(self.names, full.split(sizes), self.shapes, strict=True)
        tensors = {name: part.view(shape) for name, part, shape in parts}
        for rank, shard in enumerate(shards):
            for name, window, view in self.places(shard, rank):
                tensors[name][window].unflatten(0, (self.groups, -1)).copy_(view)


def stored_parameters(stage: Any, hf_config: PretrainedConfig) -> dict[str, tuple[Stored, ...]]:
    """Map the name of each of a stage's parameters to the checkpoint's tensors; an expert's to the tensors of the
    experts that all expert-parallel ranks have in its place."""
    ep = parallel_state.get_expert_model_parallel_world_size()
    weights, found = FAMILIES[hf_config.model_type].weights, {}
    for name, parameter in stage.named_parameters():
        match = _NAME.fullmatch(name)
        assert match is not None
        layer, key, expert = match.groups()
        prefix = "" if layer is None else f"model.layers.{stage.decoder.layers[int(layer)].layer_number - 1}."
        weight = weights[key]
        if key == "output_layer.weight" and hf_config.tie_word_embeddings:
            weight = weights["embedding.word_embeddings.weight"]
        # Each expert-parallel rank has an equal number of consecutive experts.
        experts = [rank * (stage.config.num_moe_experts // ep) + int(expert) for rank in range(ep)] if expert else [0]
        names = (tuple(prefix + part.format(expert=number) for part in weight.names) for number in experts)
        found[name] = tuple(
            Stored.of(weight, each, parameter.shape, stage.config, hf_config.vocab_size) for each in names
        )
    return found


@torch.no_grad()
def load_weights(stage: Any, stored: dict[str, tuple[Stored, ...]], folder: Path) -> None:
    """Fill a stage's parameters from the safetensors in ``folder``. Each rank reads only its part.

    Raises:
        UsageError: a tensor is missing, or its shape does not fit the configuration.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    wanted: dict[str, list[tuple[tuple[slice, ...], Tensor]]] = defaultdict(list)
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in stage.named_parameters():
        of_ranks = stored[name]
        own = of_ranks[expert_rank if len(of_ranks) > 1 else 0]
        shapes |= zip(own.names, own.shapes, strict=True)
        parameter.zero_()  # a vocabulary's padding
        for tensor, window, view in own.places(parameter, rank):
            wanted[tensor].append((window, view))
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            for name in sorted(wanted.keys() & tensors.keys()):
                part = tensors.get_slice(name)
                if tuple(part.get_shape()) != shapes[name]:
                    raise UsageError(
                        f"{folder}: {name} has the shape {tuple(part.get_shape())} in {file.name}, and config.json "
                        f"says {shapes[name]}; give weights and configuration of the same model."
                    )
                for window, view in wanted.pop(name):
                    view.copy_(part[window].unflatten(0, (view.shape[0], -1)))
    if wanted:
        raise UsageError(f"{folder} lacks {min(wanted)}, and {len(wanted) - 1} more; give all of the model's weights.")
