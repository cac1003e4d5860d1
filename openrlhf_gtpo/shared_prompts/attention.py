"""The attention of a packed tree: a segment's queries see the keys of its path, causally from the bottom right.

On a GPU this is FlashAttention with gathered keys, which may outnumber the queries. Elsewhere, torch's own attention
is called on padded segments.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.shared_prompts.tree import Tree

# Below this many queries, torch's attention on a CPU is faster in float32 (see megatron/model/layers.py).
_SHORT = 384


def attend(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None = None) -> Tensor:
    """Map (T, heads, D) queries and (T, groups, D) keys and values to (T, heads, D)."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, tree, scale)
    return _padded(query, key, value, tree, scale)


def gather(tensor: Tensor, index: Tensor) -> Tensor:
    """Return ``tensor[index]``; gradients are summed in at least float32: a prompt's keys get one from each
    response."""
    return _Gather.apply(tensor, index.flatten()).view(*index.shape, *tensor.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype
        return tensor.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(ctx.shape, dtype=wide, device=gradient.device)
        return total.index_add_(0, index, gradient.to(wide)).to(ctx.dtype), None


def _padded(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None) -> Tensor:
    buckets, back = tree.buckets
    exact: tuple[Tensor, ...] | None = None
    outputs = []
    for bucket in buckets:
        inputs: tuple[Tensor, ...] = (query, key, value)
        if query.dtype == torch.bfloat16 and bucket.queries.shape[1] < _SHORT:
            inputs = exact = exact or tuple(tensor.float() for tensor in inputs)
        queries, keys = (places.to(query.device) for places in (bucket.queries, bucket.keys))
        q, k, v = (gather(t, p).transpose(1, 2) for t, p in zip(inputs, (queries, keys, keys), strict=True))
        bias = bucket.bias
        bias = None if bias is None else bias.to(q)
        out = F.scaled_dot_product_attention(
            q, k, v, bias, is_causal=bias is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.to(query.dtype).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, back.to(query.device))


def _flash(query: Tensor, key: Tensor, value: Tensor, tree: Tree, scale: float | None) -> Tensor:
    """flash-attn if it is installed, torch's own otherwise; both align a causal mask to the bottom right."""
    queries, keys, places = tree.on(query.device)
    inputs = query, gather(key, places), gather(value, places)
    bounds = queries, keys, *tree.longest
    try:
        from flash_attn import flash_attn_varlen_func  # the stand-in lacks it
    except ImportError:
        return varlen_attention.causal(*inputs, *bounds, scale)
    deterministic = torch.are_deterministic_algorithms_enabled()
    return flash_attn_varlen_func(*inputs, *bounds, softmax_scale=scale, causal=True, deterministic=deterministic)
