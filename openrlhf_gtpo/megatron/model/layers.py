"""Transformer layers in plain torch, under the parameter names of Transformer Engine's fused modules.

Hosts with and without Transformer Engine can then share one conversion and one checkpoint. The layers support sequence
parallelism and packed sequences, which Megatron's own local layers do not.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from openrlhf_gtpo.megatron.model.expert_layers import portable_experts
from openrlhf_gtpo.megatron.model.packing import TreeParams
from openrlhf_gtpo.megatron.parallel.context import chunks_of_rank
from openrlhf_gtpo.shared_prompts import attention as shared_prompts

# Below this many tokens, torch's attention on a CPU is faster in float32: its bfloat16 backward pass is made for long
# rows (16 sequences of 84 to 247 tokens: 37 against 54 ms, one of 2048: 241 against 178 ms, two cores).
_SHORT = 384


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize (..., H) in float32, round to the dtype of ``hidden``, then scale, as Transformers' Llama does."""
    exact = hidden.float()
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return weight * exact.to(hidden.dtype)


class RMSNorm(torch.nn.Module):
    """RMS norm over the last dimension (H,). Under sequence parallelism its gradient is summed over the TP group."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return rms_norm(hidden, self.weight, self.eps)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm, then a column-parallel product: (s, b, H) to (s, b, O/TP). Owns the norm as ``layer_norm_weight``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = _norm_weight(config, input_size)

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        normed = rms_norm(input_, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *args, **kwargs)


class PackedAttention(torch.nn.Module):
    """Causal attention within each packed sequence: (T, heads, D) and cumulative lengths in, (T, heads * D) out."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        assert config.attention_dropout == 0, "dropout would make the log-probs of two passes differ"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        assert packed_seq_params is not None, "every micro-batch is packed"
        assert attention_bias is None and attention_mask is None
        if isinstance(packed_seq_params, TreeParams):
            assert packed_seq_params.tree is not None
            return shared_prompts.attend(query, key, value, packed_seq_params.tree, self.softmax_scale).flatten(1)
        lengths = packed_seq_params.cu_seqlens_q.diff()
        group = parallel_state.get_context_parallel_group()
        if group.size() > 1:
            return attend(query, key, value, lengths, self.softmax_scale, group)
        rows = [tensor.split(lengths.tolist()) for tensor in (query, key, value)]
        return torch.cat([self._one_sequence(*row) for row in zip(*rows, strict=True)])

    def _one_sequence(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention within one sequence: (t, heads, D) and twice (t, groups, D) to (t, heads * D)."""
        q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        if q.device.type == "cpu" and query.size(0) < _SHORT:
            q, k, v = q.float(), k.float(), v.float()
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out.to(query.dtype).squeeze(0).transpose(0, 1).reshape(query.size(0), -1)


def portable_layer_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Build the decoder of this pipeline stage from the layers of this module."""
    qk_norm = RMSNorm if config.qk_layernorm else IdentityOp
    mixture = config.num_moe_experts is not None
    dense = ModuleSpec(
        module=MLP, submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=NormColumnParallelLinear,
                    core_attention=PackedAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=qk_norm,
                    k_layernorm=qk_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            # A mixture's router and experts share the normalized input, so its norm is a separate layer.
            pre_mlp_layernorm=RMSNorm if mixture else IdentityOp,
            mlp=portable_experts() if mixture else dense,
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm
    )


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype))
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scale: float | None,
    group: torch.distributed.ProcessGroup,
) -> Tensor:
    """Compute attention of this rank's queries (P / CP, heads, D) to all ranks' keys and values: (P / CP, heads * D).

    For hosts without Transformer Engine, and as a reference for its ring: simple, but needs a whole row's memory.

    Args:
        lengths: (S,) full lengths of all sequences.
    """
    order = torch.cat([chunks_of_rank(lengths, group.size(), rank) for rank in range(group.size())])
    back = order.argsort()
    # The gather's backward pass sums the gradients of these keys and values from all ranks' queries.
    keys, values = (gather_from_sequence_parallel_region(t.contiguous(), group=group)[back] for t in (key, value))
    local = chunks_of_rank(lengths, group.size(), group.rank())
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    everywhere = torch.arange(len(sequence), device=lengths.device)
    visible = (sequence[local][:, None] == sequence) & (local[:, None] >= everywhere)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out.squeeze(0).transpose(0, 1).reshape(query.size(0), -1)
