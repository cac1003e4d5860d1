"""Transformer Engine's attention over a tree of tokens: keys are gathered, and there may be more of them than queries.

Only CUDA hosts with Transformer Engine import this.
"""

from types import SimpleNamespace
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from openrlhf_gtpo.megatron.model.packing import TreeParams
from openrlhf_gtpo.shared_prompts.attention import gather

# Transformer Engine's name, which Megatron passes on and lacks in its own list (AttnMaskType in 0.16.1 and 0.19.2).
_BOTTOM_RIGHT: Any = SimpleNamespace(name="padding_causal_bottom_right")


class SharedPromptAttention(TEDotProductAttention):
    """Megatron's, in which a segment's queries see the keys of its path."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: PackedSeqParams, **options: Any
    ) -> Tensor:
        """Like Megatron's; of (T, heads, D) queries and (T, groups, D) keys and values."""
        if not isinstance(packed_seq_params, TreeParams):
            return super().forward(query, key, value, *args, packed_seq_params=packed_seq_params, **options)
        tree = packed_seq_params.tree
        assert tree is not None
        queries, keys, places = tree.on(query.device)
        most, deepest = tree.longest
        params = PackedSeqParams("thd", queries, keys, max_seqlen_q=most, max_seqlen_kv=deepest)
        options["attn_mask_type"] = _BOTTOM_RIGHT
        mask = args[0] if args else options.pop("attention_mask", None)
        return super().forward(
            query, gather(key, places), gather(value, places), mask, packed_seq_params=params, **options
        )
