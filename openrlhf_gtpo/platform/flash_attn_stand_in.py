"""The four padding helpers of flash-attn that OpenRLHF's packing imports, in plain torch.

They move rows between a padded and a packed layout and use no attention kernels, so they work on any host. Attention
itself runs through ``sdpa`` there, or through ``varlen_attention``.
"""

import importlib.machinery
import sys
import types
from typing import Any

import torch
from einops import rearrange


def index_first_axis(tensor: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Select rows ``indices`` (N,) of ``tensor`` (M, ...): (N, ...)."""
    return tensor[indices]


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Pack (B, T, ...) by its mask (B, T): the rows (N, ...), their flat indices (N,), cumulative lengths (B+1,), the
    longest length and the lengths (B,)."""
    lengths = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = attention_mask.flatten().nonzero().flatten()
    cumulative = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    packed = rearrange(hidden_states, "b s ... -> (b s) ...")[indices]
    return packed, indices, cumulative, int(lengths.max()), lengths


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Unpack rows (N, ...) back to (batch, seqlen, ...), zero where nothing was packed."""
    padded = hidden_states.new_zeros((batch * seqlen, *hidden_states.shape[1:]))
    padded = padded.index_copy(0, indices, hidden_states)
    return rearrange(padded, "(b s) ... -> b s ...", b=batch)


def _no_ring_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    raise NotImplementedError(
        "Ring attention (--ds.ring_attn_size > 1) needs flash-attn; use the CUDA image, which has it (docs/docker.md)."
    )


def install() -> None:
    """Register the stand-in as ``flash_attn`` in this process."""
    padding = {f.__name__: f for f in (index_first_axis, unpad_input, pad_input, rearrange)}
    contents: dict[str, dict[str, Any]] = {
        "flash_attn": {"__path__": []},
        "flash_attn.bert_padding": padding,
        "flash_attn.utils": {"__path__": []},
        "flash_attn.utils.distributed": {"all_gather": _no_ring_attention},
    }
    for name, attributes in contents.items():
        module = sys.modules[name] = types.ModuleType(name)
        # transformers asks importlib for the spec, and a module without one is an error (transformers 5.15.0,
        # utils/import_utils.py, _is_package_available).
        vars(module).update(attributes, __spec__=importlib.machinery.ModuleSpec(name, loader=None))
