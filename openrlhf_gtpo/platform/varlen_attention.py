"""FlashAttention over packed rows with torch's own kernels, for CUDA hosts without flash-attn.

OpenRLHF packs rows into one, whose position ids restart at 0, and the attention has to keep them apart. Transformers
does that with flash-attn, or with ``sdpa`` and a T x T mask. With ``attn_implementation`` ``NAME``, it calls
``torch.nn.attention.varlen``, which needs no mask.
"""

import inspect
from functools import lru_cache
from typing import Any

import torch

NAME = "varlen"


def is_available() -> bool:
    """True if torch has these kernels with a window and a scale, as it does from 2.11 on."""
    try:
        return {"window_size", "scale"} <= _parameters()
    except ImportError:
        return False


def register() -> None:
    """Register ``NAME`` as an attention of Transformers in this process. Safe to call twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, varlen_attention)
    AttentionMaskInterface.register(NAME, flash_attention_mask)  # no mask, except for padding


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    position_ids: torch.Tensor,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each packed row, with Transformers' calling convention.

    Args:
        query, key, value: (1, H, T, D) in half precision; key and value may have fewer heads.
        position_ids: (1, T), 0 where a row begins.
        sliding_window: tokens that a query sees, its own included; None for all.

    Returns:
        (1, T, H, D), and None in place of weights.

    Raises:
        ValueError: rows are padded, or the model needs something that these kernels lack.
    """
    padded = attention_mask is not None or len(query) != 1
    bidirectional = is_causal is False or not getattr(module, "is_causal", True)
    if padded or bidirectional or dropout or softcap is not None or s_aux is not None:
        raise ValueError(
            f"Attention {NAME!r} supports only causal attention over packed rows, without dropout, soft cap or "
            "sinks: give --ds.attn_implementation sdpa, or install flash-attn."
        )
    bounds, longest = _rows(position_ids)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return causal(q, k, v, bounds, bounds, longest, longest, scaling, sliding_window)[None], None


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_bounds: torch.Tensor,
    key_bounds: torch.Tensor,
    most_queries: int,
    most_keys: int,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Map packed (T, H, D) queries and (K, G, D) keys and values to (T, H, D). The last query of a row sees all of the
    row's keys, which may outnumber the queries; with ``window``, only that many of the last ones."""
    from torch.nn.attention.varlen import varlen_attn

    sizes = query_bounds, key_bounds, most_queries, most_keys
    grouped = {"enable_gqa": True} if "enable_gqa" in _parameters() else {}  # torch 2.11 groups heads without the flag
    seen = (-1 if window is None else window - 1, 0)
    return varlen_attn(query, key, value, *sizes, scale=scale, window_size=seen, **grouped)


@lru_cache(maxsize=1)
def _rows(position_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The bounds of the rows in ``position_ids`` (1, T), (N + 1,), and the longest row's length. Cached, because all
    layers ask with the same tensor, and each computation stalls the GPU."""
    bounds = torch.nn.functional.pad((position_ids[0] == 0).nonzero()[:, 0], (0, 1), value=position_ids.shape[1])
    return bounds.int(), int(bounds.diff().max())


def _parameters() -> set[str]:
    from torch.nn.attention.varlen import varlen_attn

    return set(inspect.signature(varlen_attn).parameters)
