"""The parts of an advantage, and the penalties R(i) on long responses."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

LengthPenaltyForm = Literal["continuous", "as_printed"]


class CreditParts(NamedTuple):
    """The parts of an advantage, A = (reward - mean) / std. ``share`` and ``reward`` are (B, T) for GTPO, (B,) for
    GRPO-S. ``reward`` is the row's reward in its own set, including its length penalty. ``mean`` and ``std`` are (B,),
    of the set it is normalized in. ``row_entropy``, (B,), is the entropy that a sequence-level share compares; None at
    token level."""

    share: Tensor
    reward: Tensor
    mean: Tensor
    std: Tensor
    row_entropy: Tensor | None = None


def length_penalty(
    lengths: Tensor, soft_limit: float, hard_limit: int, form: LengthPenaltyForm = "continuous"
) -> Tensor:
    """Compute R(i) of each response (§4.5.1; DAPO's overlong penalty, arXiv 2503.14476), added to rewards after
    shaping.

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
            f"soft_limit={soft_limit}, hard_limit={hard_limit} leave no room for a penalty; expected 0 <= soft_limit "
            "< hard_limit."
        )
    width = hard_limit - soft_limit if form == "continuous" else hard_limit
    slope = (soft_limit - lengths.double()) / width
    return torch.where(lengths > hard_limit, -1.0, slope.clamp_max(0)).float()


def group_relative_penalty(lengths: Tensor, won: Tensor, group_ids: Tensor) -> Tensor:
    """Compute R(i) from the lengths of a response's own group: GROP, from Appendix D of the paper's revision.

    The revision's text was not available, so this follows public descriptions and code. Let p be the share of a
    group's responses that are right. If p >= 3/4, the right ones are penalized, with a knee L from their lengths. If p
    <= 1/4, none is. Otherwise the larger side is penalized, the wrong one on a tie, with L from all lengths. L is
    max((min + max) / 2, mean) of those lengths. R is 0 below L, -1/2 from 2 L on, and -(|o| - L) / 2 L in between.

    Args:
        lengths: (B,) int, action tokens per response.
        won: (B,) bool, True for rows of O+.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.

    Returns:
        (B,) float32 in [-1/2, 0].
    """
    ids, group = group_ids.unique(return_inverse=True)
    lengths = lengths.double()
    everyone = torch.ones_like(won)

    def of_group(values: Tensor, rows: Tensor, reduce: str) -> Tensor:
        """Reduce ``values`` over the rows of each group that are in ``rows``, (B,); 0 where there are none."""
        empty = values.new_zeros(len(ids))
        return empty.scatter_reduce(0, group[rows], values[rows], reduce, include_self=False)[group]

    def knee(rows: Tensor) -> Tensor:
        middle = (of_group(lengths, rows, "amin") + of_group(lengths, rows, "amax")) / 2
        return torch.maximum(middle, of_group(lengths, rows, "mean"))

    share = of_group(won.double(), everyone, "mean")
    penalized = torch.where(share > 0.5, won, ~won) & (share > 0.25)
    bound = torch.where(share >= 0.75, knee(won), knee(everyone)).clamp_min(1e-9)  # 0 if no row has a token
    return (-(lengths / bound - 1).clamp(0, 1) / 2).where(penalized, 0).float()


def length_rescaling(lengths: Tensor, outcome: Tensor, group_ids: Tensor, alpha: float = 0.33) -> Tensor:
    """Compute the term that, added to an outcome r, makes it r / (1 + alpha |o| / mean |o|), with the mean over a
    row's group: GR3, group relative reward rescaling (arXiv 2603.10535, Eq. 6, 15).

    Only right responses lose reward, and long ones lose more. The paper takes alpha = 0.33 for mathematics and code:
    the largest for which a right response of mean length kept an advantage of at least 0 in 99.9 % of the groups (Eq.
    16).

    Departure: GTPO and GRPO-S add the term to the shaped reward, so it does not rescale the entropy share.

    Args:
        lengths: (B,) int, action tokens per response.
        outcome: (B,) rewards of at least 0.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.

    Returns:
        (B,) float32 between -r and 0.

    Raises:
        ValueError: a reward below 0. Rescaling would raise it, and more so for longer responses.
    """
    if (outcome < 0).any():
        row = int((outcome < 0).nonzero()[0])
        raise ValueError(f"outcome of row {row} is {outcome[row].item():g}; rewards that are rescaled must be >= 0.")
    ids, group = group_ids.unique(return_inverse=True)
    lengths = lengths.double()
    mean = lengths.new_zeros(len(ids)).scatter_reduce(0, group, lengths, "mean", include_self=False)[group]
    scale = 1 / (1 + alpha * lengths / mean.clamp_min(1e-9))  # 1 in a group without tokens
    return (outcome.double() * (scale - 1)).float()
