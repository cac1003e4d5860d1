"""Rows, the groups that they form, and the mean and std that a row's rewards are normalized with.

Owns everything that is known per row: the split of a group into O+ and O-, and which rows statistics are taken over.
Rows of a group need not be adjacent, groups may differ in size, and group ids are any integers. Uses no entropies.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .checks import check_batch, check_rows
from .config import NormaliseOver, Scope

# Work on a (B, T) batch runs over slices of whole rows of about this many elements, so that its float64 and int64
# temporaries are small and stay in cache. Below 2**15 elements torch runs an operation on the calling thread, without
# a barrier per operation. Where the cores are busy (rollout engines, other ranks), that barrier cost a hundred times
# more than the second core gained.
CHUNK_ELEMENTS = 2**15 - 1

STD_EPS = 1e-9  # added to the std, as OpenRLHF's group_norm does


@dataclass(frozen=True)
class Rows:
    """One entry per row of the batch, all on the device of the mask."""

    outcome: Tensor  # (B,) float64
    success: Tensor  # (B,) bool, True for O+
    penalty: Tensor  # (B,) float64, for the response's length; 0 without one
    length: Tensor  # (B,) int64, number of action tokens
    group: Tensor  # (B,) int64, numbered from 0 without gaps
    polar_group: Tensor  # (B,) int64 in [0, num_polar_groups): the O+ or the O- of a group
    group_ids: Tensor  # (B,) int64, as given
    num_polar_groups: int

    def uniform(self, counted: Tensor) -> Tensor:
        """(B,) bool, True if the ``counted`` (B,) rows of a row's group all succeed or all fail."""
        won, lost = (sum_by((own & counted).long(), self.group, len(own)) for own in (self.success, ~self.success))
        return (won == 0) | (lost == 0)


def success(outcome: Tensor, threshold: float = 1.0) -> Tensor:
    """True for each row that belongs to O+.

    Args:
        outcome: (B,) outcome rewards before any length penalty.
        threshold: rows with outcome >= threshold belong to O+. Both are compared in float32, which a run's rewards
            have, or in the outcome's precision if that is coarser: a float32 reward of 0.9 is not below 0.9, and
            0.7 + 0.2 + 0.1 is not below 1, though they would be in float64.

    Returns:
        (B,) bool.
    """
    if outcome.dtype == torch.float64:
        outcome = outcome.float()
    return outcome >= (outcome.new_tensor(threshold) if outcome.is_floating_point() else threshold)


def split_rows(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    threshold: float,
    length_penalty: Tensor | None = None,
) -> Rows:
    """Sort the rows of a (B, T) batch into groups and polarities.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a non-finite outcome or penalty (the message names the row).
    """
    check_batch(entropy, mask, outcome, group_ids)
    penalty = torch.zeros(len(entropy)) if length_penalty is None else length_penalty
    check_rows("length_penalty", penalty, len(entropy))
    outcome, group_ids = outcome.detach().to(mask.device), group_ids.to(mask.device, torch.int64)
    succeeded = success(outcome, threshold)
    _, group = torch.unique(group_ids, return_inverse=True)
    polar_groups, polar_group = torch.unique(2 * group + succeeded, return_inverse=True)
    return Rows(
        outcome=outcome.double(),
        success=succeeded,
        penalty=penalty.detach().to(mask.device, torch.float64),
        length=mask.sum(-1),
        group=group,
        polar_group=polar_group,
        group_ids=group_ids,
        num_polar_groups=polar_groups.numel(),
    )


def row_chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Slices of rows, about ``CHUNK_ELEMENTS`` elements each, that cover the batch once."""
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def sum_by(values: Tensor, key: Tensor, num_keys: int) -> Tensor:
    """(B,) for each row, the sum of ``values`` over all rows with the same key."""
    return values.new_zeros(num_keys).scatter_add_(0, key, values)[key]


def output_dtype(entropy: Tensor) -> torch.dtype:
    """float32, or float64 if the entropies are float64."""
    return torch.promote_types(entropy.dtype, torch.float32)


class RowMoments(NamedTuple):
    """(B,) float64 each: number of values in a row, their mean, and their sum of squared deviations from that mean."""

    num_values: Tensor
    mean: Tensor
    squares: Tensor


def mean_and_std(
    moments: RowMoments, rows: Rows, *, two_sets: bool, scope: Scope, over: NormaliseOver
) -> tuple[Tensor, Tensor]:
    """The mean and std that each row's rewards are normalized with (Eq. 3, 8, 14, 15, 19; rev. Eq. 6).

    Moments of rows are merged as in Chan et al., so that groups with any number of tokens keep their precision. The
    std is the unbiased one; a set with fewer than two values has std 0. Uniform groups count under both scopes.

    Args:
        moments: those of a row's reward in its own set: r+ for a row of O+, r- for a row of O-, or its only reward.
        two_sets: whether O+ and O- are normalized as two sets (Eq. 14, 15, 19) instead of one (Eq. 3, 8).
        scope: the rows that form a set: those of the group or those of the batch.
        over: whether each of the two sets has zeros for the rows of the other polarity, or only rows of one polarity.

    Returns:
        mean and std, (B,) float64 each, without ``STD_EPS``.

    Raises:
        ValueError: a group of one row under ``scope="group"``.
    """
    if scope == "group":
        alone = torch.bincount(rows.group)[rows.group] < 2
        if alone.any():
            row = int(alone.nonzero()[0])
            raise ValueError(
                f"group_ids: group {rows.group_ids[row].item()} has only row {row}, but scope='group' normalizes over "
                "the rows of a group; sample at least 2 responses per prompt or, if the estimator has it, "
                "use scope='batch'."
            )
    everyone = rows.group if scope == "group" else torch.zeros_like(rows.group)
    if not two_sets:
        return _merge(moments, everyone)
    if over == "polarity":
        return _merge(moments, rows.polar_group if scope == "group" else rows.success.long())
    # A row of O- is all zeros in the set of r+, as is a row of O+ in the set of r-; those zeros count.
    positive, negative = (
        _merge(RowMoments(moments.num_values, moments.mean * own, moments.squares * own), everyone)
        for own in (rows.success, ~rows.success)
    )
    mean, std = (torch.where(rows.success, *pair) for pair in zip(positive, negative, strict=True))
    return mean, std


def _merge(moments: RowMoments, key: Tensor) -> tuple[Tensor, Tensor]:
    """For each row, the mean and unbiased std over all values of the rows that share its key."""
    num_keys = key.numel() + 1  # keys are below the number of rows, except for the two polarities of a one-row batch
    count = sum_by(moments.num_values, key, num_keys)
    mean = sum_by(moments.num_values * moments.mean, key, num_keys) / count.clamp_min(1)
    squares = sum_by(moments.squares + moments.num_values * (moments.mean - mean).square(), key, num_keys)
    return mean, (squares / (count - 1).clamp_min(1)).sqrt()
