"""Packed causal attention over tokens that context-parallel ranks share, in plain torch: keys and values are gathered.

For hosts without Transformer Engine, and the yardstick of its ring: simple, and as large in memory as the whole row.
"""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from openrlhf_gtpo.megatron.parallel.context import chunks_of_rank


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    scale: float | None,
    group: torch.distributed.ProcessGroup,
) -> Tensor:
    """This rank's (P / CP, heads, D) of queries against everyone's keys and values; (P / CP, heads * D).

    Args:
        lengths: (S,) of all sequences in full.
    """
    order = torch.cat([chunks_of_rank(lengths, group.size(), rank) for rank in range(group.size())])
    back = order.argsort()
    # Its backward sums what every rank's queries gave to these keys and values.
    keys, values = (gather_from_sequence_parallel_region(t.contiguous(), group=group)[back] for t in (key, value))
    mine = chunks_of_rank(lengths, group.size(), group.rank())
    sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
    everywhere = torch.arange(len(sequence), device=lengths.device)
    visible = (sequence[mine][:, None] == sequence) & (mine[:, None] >= everywhere)
    q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, keys, values))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.size(1) != k.size(1))
    return out.squeeze(0).transpose(0, 1).reshape(query.size(0), -1)
