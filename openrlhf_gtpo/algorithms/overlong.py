"""The penalty R(i) on long responses (§4.5.1 of arXiv 2508.04349; DAPO's overlong penalty, arXiv 2503.14476).

Owns the piecewise formula. It is added to a shaped reward by the advantage functions and never decides success.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from .config import check_choice

LengthPenaltyForm = Literal["continuous", "as_printed"]


def length_penalty(
    lengths: Tensor, soft_limit: int, hard_limit: int, form: LengthPenaltyForm = "continuous"
) -> Tensor:
    """R(i) of each response, with L = ``soft_limit``, L2 = ``hard_limit`` and L1 = L2 - L.

    0 up to L, -1 beyond L2, and in between (L - |o|) / L1 (``continuous``), or (L - |o|) / L2 as the paper prints it,
    which jumps from -L1 / L2 to -1 at L2 (``as_printed``).

    Args:
        lengths: (B,) int, action tokens per response.

    Returns:
        (B,) float32 in [-1, 0].

    Raises:
        ValueError: an unknown form, lengths that are not integers >= 0, or not 0 <= soft_limit < hard_limit.
    """
    check_choice("form", form, get_args(LengthPenaltyForm))
    if not 0 <= soft_limit < hard_limit:
        raise ValueError(
            f"soft_limit={soft_limit}, hard_limit={hard_limit} leave no room for a penalty; "
            "use 0 <= soft_limit < hard_limit."
        )
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise ValueError(f"lengths has dtype {lengths.dtype}, but lengths are counts of tokens; use torch.int64.")
    if lengths.dim() != 1:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)}, but it must be (B,): one length per row.")
    if (lengths < 0).any():
        row = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths of row {row} is {lengths[row].item()}, but a length cannot be negative; use >= 0.")
    width = hard_limit - soft_limit if form == "continuous" else hard_limit
    slope = (soft_limit - lengths.double()) / width
    penalty = torch.where(lengths > hard_limit, -1.0, slope.clamp_max(0))
    return penalty.float()
