"""From rewards to advantages: whose mean and std a row is normalised with (Eq. 3, 8, 14, 15, 19; rev. Eq. 6).

Owns the choice of the set (one or two, zeros included or not, group or batch) for token and sequence rewards alike: a
sequence reward is a row with a single value. Knows no entropies.

Rows come in as count, mean and sum of squared deviations, all float64, and are merged as Chan et al. do, so that groups
of any number of tokens keep their digits. The std is the unbiased one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import GRPOSConfig, GTPOConfig
from .groups import Rows

STD_EPS = 1e-9  # added to the std, as OpenRLHF's group_norm does


class RowMoments(NamedTuple):
    """(B,) float64 each: number of values in the row, their mean, their sum of squared deviations from it."""

    num_values: Tensor
    mean: Tensor
    squares: Tensor


def token_moments(values: Tensor, mask: Tensor) -> RowMoments:
    """Moments of each row of (B, T) float64 ``values``, which are 0 where ``mask`` is False."""
    count = mask.sum(-1).double()
    mean = values.sum(-1) / count.clamp_min(1)
    squares = (values - mean[:, None]).square_().masked_fill_(~mask, 0).sum(-1)
    return RowMoments(count, mean, squares)


def mean_and_std(moments: RowMoments, rows: Rows, config: GTPOConfig | GRPOSConfig) -> tuple[Tensor, Tensor]:
    """The mean and std that each row's rewards are normalised with.

    ``moments`` are those of a row's reward in its own set: r+ for rows of O+, r- for rows of O-, or the only reward
    of a one-set variant. The statistics cover uniform groups too, under ``scope="batch"`` as well; a set with fewer
    than two values has std 0.

    Returns:
        mean and std, (B,) float64 each, without ``STD_EPS``.
    """
    whole_batch = config.scope == "batch"
    everyone = torch.zeros_like(rows.group) if whole_batch else rows.group
    if not config.two_sets:
        return _merge(moments, everyone)
    if config.normalise_over == "polarity":
        return _merge(moments, rows.success.long() if whole_batch else rows.polar_group)
    # A row of O- is all zeros in the set of r+, and a row of O+ in that of r-; those zeros count.
    mean_positive, std_positive = _merge(_zero_unless(rows.success, moments), everyone)
    mean_negative, std_negative = _merge(_zero_unless(~rows.success, moments), everyone)
    return (
        torch.where(rows.success, mean_positive, mean_negative),
        torch.where(rows.success, std_positive, std_negative),
    )


def _zero_unless(own: Tensor, moments: RowMoments) -> RowMoments:
    return RowMoments(moments.num_values, moments.mean * own, moments.squares * own)


def _merge(moments: RowMoments, key: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and unbiased std over all values of the rows that share a key, given back to each row."""

    def total(values: Tensor) -> Tensor:
        # Keys are below the number of rows, but for the two polarities of a batch of one row.
        return values.new_zeros(values.numel() + 1).scatter_add_(0, key, values)[key]

    count = total(moments.num_values)
    mean = total(moments.num_values * moments.mean) / count.clamp_min(1)
    squares = total(moments.squares + moments.num_values * (moments.mean - mean).square())
    return mean, (squares / (count - 1).clamp_min(1)).sqrt()
