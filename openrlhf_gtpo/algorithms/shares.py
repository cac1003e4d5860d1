"""Entropy shares: how uncertain a token, or a response, was compared with the others of its polarity.

Owns the fractions of Eq. 2, 5, 13 and 17 and everything that is computed from an entropy. Knows no rewards.

A row of O+ weighs in with H, a row of O- with 1/H; its share is its weight over the mean weight of what it is compared
with. The weights are float64, and entropies are detached and clamped from below at ``entropy_eps`` first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_batch, check_finite_tokens
from .config import GRPOSConfig, GTPOConfig, Mean
from .groups import Rows, row_chunks, split_rows


class TokenShares:
    """share_{i,t} of a batch (Eq. 2, 13), handed out for a slice of rows at a time.

    Position t counts action tokens, not columns. Where responses are compared at the same position the mean weights
    are kept in a table of (O+ and O- of every group, positions), so that no (B, T) float64 tensor is ever held.
    """

    def __init__(self, entropy: Tensor, mask: Tensor, rows: Rows, config: GTPOConfig) -> None:
        self.entropy, self.mask, self.rows, self.config = entropy.detach(), mask, rows, config
        num_rows, num_columns = entropy.shape
        self.width = num_columns + 1  # positions 1..T; 0 is "before the first action token" and never counts
        by_position = config.compare == "position"
        if by_position:
            sums = torch.zeros(rows.num_polar_groups * self.width, dtype=torch.float64, device=entropy.device)
        else:
            row_sums = torch.zeros(num_rows, dtype=torch.float64, device=entropy.device)
        for chunk in row_chunks(num_rows, num_columns):
            check_finite_tokens("entropy", self.entropy[chunk], mask[chunk], chunk.start)
            weight = self._weight(chunk)
            if config.entropy_mean == "geometric":
                weight.log_()
            weight.masked_fill_(~mask[chunk], 0)
            if by_position:
                sums.scatter_add_(0, self._position_key(chunk).view(-1), weight.view(-1))
            else:
                row_sums[chunk] = weight.sum(-1)
        if by_position:
            self.mean = self._position_mean(sums)
        else:
            self.mean = self._row_mean(row_sums)

    def __call__(self, chunk: slice) -> Tensor:
        """(rows of ``chunk``, T) float64, 0 where the mask is False."""
        weight = self._weight(chunk)
        if self.config.compare == "position":
            weight /= self.mean.gather(0, self._position_key(chunk).view(-1)).view_as(weight)
        else:
            weight /= self.mean[chunk, None]
        return weight.masked_fill_(~self.mask[chunk], 0)

    def _weight(self, chunk: slice) -> Tensor:
        entropy = self.entropy[chunk].to(torch.float64, copy=True).clamp_min_(self.config.entropy_eps)
        entropy.masked_fill_(~self.mask[chunk], 1)  # padding may hold anything, NaN included
        return torch.where(self.rows.success[chunk, None], entropy, entropy.reciprocal())

    def _position_key(self, chunk: slice) -> Tensor:
        key = self.mask[chunk].cumsum(-1)
        key += self.rows.polar_group[chunk, None] * self.width
        return key

    def _position_mean(self, sums: Tensor) -> Tensor:
        """Sums over the rows alive at t, divided by their number d_t (or h_t)."""
        rows, width = self.rows, self.width
        # A row of length l is alive at t = 1..l, so it has left from l + 1 on.
        left = torch.zeros(rows.num_polar_groups * (width + 1), dtype=torch.int32, device=sums.device)
        leaves_at = rows.polar_group * (width + 1) + rows.length + 1
        left.scatter_add_(0, leaves_at, torch.ones_like(leaves_at, dtype=torch.int32))
        left = left.view(-1, width + 1).cumsum_(1)[:, :width]
        size = torch.bincount(rows.polar_group, minlength=rows.num_polar_groups)[:, None]
        mean = sums.view(-1, width)
        for chunk in row_chunks(*mean.shape):
            mean[chunk] /= (size[chunk] - left[chunk]).clamp_min_(1)
        if self.config.entropy_mean == "geometric":
            mean.exp_()
        mean[:, 0] = 1
        return mean.view(-1)

    def _row_mean(self, row_sums: Tensor) -> Tensor:
        """(B,) mean weight over the row's own response, or over the tokens of its O+ or O-."""
        length = self.rows.length
        if self.config.compare == "group":
            row_sums = sum_by(row_sums, self.rows.polar_group, self.rows.num_polar_groups)
            length = sum_by(length, self.rows.polar_group, self.rows.num_polar_groups)
        mean = row_sums / length.clamp_min(1)
        if self.config.entropy_mean == "geometric":
            mean.exp_()
        return torch.where(length > 0, mean, 1)


@torch.no_grad()
def gtpo_shares(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig
) -> tuple[Tensor, Tensor]:
    """The entropy shares that GTPO's rewards are made of, for metrics and plots.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool. outcome: (B,). group_ids: (B,) int.
        config: which comparison and which mean.

    Returns:
        share+ and share- (Eq. 2, 13), (B, T) each: share+ is 0 on rows of O-, share- on rows of O+, both outside the
        mask. With the arithmetic mean their mean over what is compared is 1.

    Raises:
        ValueError: shapes that do not fit, or a NaN or infinity, with the row.
    """
    check_batch(entropy, mask, outcome, group_ids)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    shares = TokenShares(entropy, mask, rows, config)
    positive = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    negative = torch.zeros_like(positive)
    for chunk in row_chunks(*entropy.shape):
        share, succeeded = shares(chunk), rows.success[chunk, None]
        positive[chunk] = share * succeeded
        negative[chunk] = share * ~succeeded
    return positive, negative


@torch.no_grad()
def grpo_s_shares(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GRPOSConfig) -> Tensor:
    """The entropy shares that GRPO-S's rewards are made of (Eq. 5, 17).

    Args:
        entropy: (B, T) nats. mask: (B, T) bool. outcome: (B,). group_ids: (B,) int.
        config: which mean.

    Returns:
        (B,) float64; over the rows of an O+ or O- their mean is 1.

    Raises:
        ValueError: shapes that do not fit, or a NaN or infinity, with the row.
    """
    check_batch(entropy, mask, outcome, group_ids)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    return sequence_shares(sequence_entropy(entropy, mask, config.entropy_mean, config.entropy_eps), rows)


@torch.no_grad()
def sequence_entropy(entropy: Tensor, mask: Tensor, mean: Mean = "arithmetic", entropy_eps: float = 1e-6) -> Tensor:
    """The mean entropy of each response: H-hat of Eq. 5.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool.
        mean: ``arithmetic``, or ``geometric`` in log space.

    Returns:
        (B,) float64 nats, each >= ``entropy_eps``; a row without action tokens has ``entropy_eps``.
    """
    total = torch.zeros(entropy.shape[0], dtype=torch.float64, device=entropy.device)
    for chunk in row_chunks(*entropy.shape):
        check_finite_tokens("entropy", entropy[chunk], mask[chunk], chunk.start)
        tokens = entropy[chunk].to(torch.float64, copy=True).clamp_min_(entropy_eps)
        if mean == "geometric":
            tokens.log_()
        total[chunk] = tokens.masked_fill_(~mask[chunk], 0).sum(-1)
    length = mask.sum(-1)
    per_row = total / length.clamp_min(1)
    if mean == "geometric":
        per_row.exp_()
    return torch.where(length > 0, per_row, entropy_eps)


def sequence_shares(per_row_entropy: Tensor, rows: Rows) -> Tensor:
    """(B,) float64: H-hat over its mean in O+, 1 / H-hat over its mean in O- (Eq. 5, 17).

    A row without action tokens has no entropy: it is left out of the means and gets the neutral share 1. (Read as
    H-hat = entropy_eps it would take the whole share of its O-.)
    """
    alive = rows.length > 0
    weight = torch.where(rows.success, per_row_entropy, per_row_entropy.reciprocal())
    total = sum_by(weight * alive, rows.polar_group, rows.num_polar_groups)
    count = sum_by(alive.double(), rows.polar_group, rows.num_polar_groups)
    return torch.where(alive, weight / total.where(alive, 1) * count, 1)


def sum_by(values: Tensor, key: Tensor, num_keys: int) -> Tensor:
    """(B,) sums of ``values`` over the rows with the same key, given back to each of those rows."""
    return torch.zeros(num_keys, dtype=values.dtype, device=values.device).scatter_add_(0, key, values)[key]


def output_dtype(entropy: Tensor) -> torch.dtype:
    """float32, or float64 where the entropies are."""
    return torch.promote_types(entropy.dtype, torch.float32)
