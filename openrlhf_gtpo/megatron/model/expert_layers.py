"""The experts of a mixture in plain torch, under the parameter names of Transformer Engine's grouped layers.

Megatron's router, token dispatcher and grouped MLP are used as is; only the two grouped matrices need Transformer
Engine, and are replaced here. Each rank owns its EP share of the experts and its TP share of each expert's columns.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from openrlhf_gtpo.megatron.parallel.host import device


class _GroupedLinear(torch.nn.Module):
    """One matrix per local expert, without a bias: (t, I) rows, sorted by expert, to (t, O).

    Nothing is communicated here: the token dispatcher brings each rank the rows of its experts, and sums over TP.
    """

    sharded_dim: int  # of the weights (O, I), along which TP shards them

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        bias: bool,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        assert not bias, "the supported mixtures have no biases in their experts"
        self.num_gemms = num_gemms
        self._groups = pg_collection
        shape = [output_size, input_size]
        shape[self.sharded_dim] //= pg_collection.expt_tp.size()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device()))
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.sharded_dim, stride=1)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, rows: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = rows.split(tokens_per_expert)
        return torch.cat([F.linear(part, weight) for part, weight in zip(parts, self.parameters(), strict=True)]), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """All experts of a layer as one tensor (experts, O, I), which any EP × TP can read, in the checkpoint format
        of Megatron's Transformer Engine layers."""
        assert metadata is not None
        first, experts = self._groups.ep.rank() * self.num_gemms, self._groups.ep.size() * self.num_gemms
        state = {}
        for i, weight in enumerate(self.parameters()):
            part = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.sharded_dim},
                (*sharded_offsets, (len(sharded_offsets), first + i, experts)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )[f"{prefix}weight"]
            # Copies are on the ranks that hold the same experts as this one, not on all data-parallel ranks.
            part.replica_id = (*part.replica_id[:2], self._groups.expt_dp.rank())
            state[f"{prefix}weight{i}"] = part
        return state


class GroupedColumnLinear(_GroupedLinear):
    """TP shards the output columns: (t, I) to (t, O/TP)."""

    sharded_dim = 0


class GroupedRowLinear(_GroupedLinear):
    """TP shards the input columns: (t, I/TP) to (t, O), a partial sum of the whole product."""

    sharded_dim = 1


def portable_experts() -> ModuleSpec:
    """Megatron's mixture-of-experts layer with the matrices of this module."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Megatron's router reads this name, which 0.16.1 defines only by importing it from Transformer Engine
        # (transformer/moe/moe_utils.py, RouterGatingLinearFunction). Can go with 0.16.1: in 0.19.2 it is None.
        moe_utils.te_general_gemm = None
    experts = ModuleSpec(
        module=TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedColumnLinear, linear_fc2=GroupedRowLinear)
    )
    return ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=experts))
