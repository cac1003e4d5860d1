"""Rewards before normalization, the parts of an advantage, and the penalty R(i) on long responses."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

LengthPenaltyForm = Literal["continuous", "as_printed"]


class CreditParts(NamedTuple):
    """The parts of an advantage, A = (reward - mean) / std. ``share`` and ``reward`` are (B, T) for GTPO, (B,) for
    GRPO-S; the reward is the row's in its own set, with its length penalty. ``mean`` and ``std`` are (B,), of the
    set it is normalized in. ``row_entropy``, (B,), is what a sequence-level share compares; None at token level."""

    share: Tensor
    reward: Tensor
    mean: Tensor
    std: Tensor
    row_entropy: Tensor | None = None


def length_penalty(
    lengths: Tensor, soft_limit: int, hard_limit: int, form: LengthPenaltyForm = "continuous"
) -> Tensor:
    """R(i) of each response (§4.5.1; DAPO's overlong penalty, arXiv 2503.14476), added to rewards after shaping.

    With L = ``soft_limit``, L2 = ``hard_limit`` and L1 = L2 - L: 0 up to L, -1 beyond L2, and in between
    (L - |o|) / L1 (``continuous``), or (L - |o|) / L2 as the paper prints it, which jumps at L2 (``as_printed``).

    Args:
        lengths: (B,) int, action tokens per response.

    Returns:
        (B,) float32 in [-1, 0].

    Raises:
        ValueError: not 0 <= soft_limit < hard_limit.
    """
    if not 0 <= soft_limit < hard_limit:
        raise ValueError(
            f"soft_limit={soft_limit}, hard_limit={hard_limit} leave no room for a penalty; "
            "use 0 <= soft_limit < hard_limit."
        )
    width = hard_limit - soft_limit if form == "continuous" else hard_limit
    slope = (soft_limit - lengths.double()) / width
    return torch.where(lengths > hard_limit, -1.0, slope.clamp_max(0)).float()
