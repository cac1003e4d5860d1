"""Which rows belong together: groups, the split of a group into O+ and O-, and chunks of rows.

Owns everything that is known per row before an entropy is read. Rows of a group need not be adjacent, groups may
differ in size, and group ids are arbitrary integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# Work on a (B, T) batch runs over slices of whole rows of about this many elements, so that its float64 and int64
# temporaries are small and stay in cache. Below 2**15 elements torch runs an operation on the calling thread: no
# barrier per operation, which on a machine whose cores are busy (rollout engines, other ranks) cost a hundred times
# more than the second core gained.
CHUNK_ELEMENTS = 2**15 - 1


@dataclass(frozen=True)
class Rows:
    """One entry per row of the batch, all on the device of the mask."""

    outcome: Tensor  # (B,) float64
    success: Tensor  # (B,) bool, True for O+
    length: Tensor  # (B,) int64, number of action tokens
    group: Tensor  # (B,) int64 in [0, num_groups)
    polar_group: Tensor  # (B,) int64 in [0, num_polar_groups): the O+ or the O- of a group
    uniform: Tensor  # (B,) bool, True where all rows of the group succeed or all fail
    num_groups: int
    num_polar_groups: int


def success(outcome: Tensor, threshold: float = 1.0) -> Tensor:
    """Rows that belong to O+.

    Args:
        outcome: (B,) outcome rewards before any length penalty.
        threshold: O+ are the rows with outcome >= threshold, in the outcome's own precision: a float32 reward of 0.9 is
            not below 0.9, though it is when both are read as float64.

    Returns:
        (B,) bool.
    """
    return outcome >= (outcome.new_tensor(threshold) if outcome.is_floating_point() else threshold)


def split_rows(mask: Tensor, outcome: Tensor, group_ids: Tensor, threshold: float) -> Rows:
    """Sort the rows of a (B, T) batch into groups and polarities."""
    outcome = outcome.detach().to(mask.device)
    succeeded = success(outcome, threshold)
    groups, group = torch.unique(group_ids.to(mask.device, torch.int64), return_inverse=True)
    polar_groups, polar_group = torch.unique(2 * group + succeeded, return_inverse=True)
    size = torch.bincount(group, minlength=groups.numel())
    num_success = torch.bincount(group[succeeded], minlength=groups.numel())
    return Rows(
        outcome=outcome.double(),
        success=succeeded,
        length=mask.sum(-1),
        group=group,
        polar_group=polar_group,
        uniform=((num_success == 0) | (num_success == size))[group],
        num_groups=groups.numel(),
        num_polar_groups=polar_groups.numel(),
    )


def check_group_sizes(rows: Rows, group_ids: Tensor) -> None:
    """Refuse a group of a single row, which has nothing to be normalised against."""
    alone = torch.bincount(rows.group, minlength=rows.num_groups)[rows.group] < 2
    if alone.any():
        row = int(alone.nonzero()[0])
        raise ValueError(
            f"group_ids: group {group_ids[row].item()} has only row {row}, but scope='group' normalises over the rows "
            "of a group; sample at least 2 responses per prompt or use scope='batch'."
        )


def row_chunks(num_rows: int, num_columns: int) -> Iterator[slice]:
    """Slices of rows of about ``CHUNK_ELEMENTS`` elements that cover the batch once."""
    step = max(1, CHUNK_ELEMENTS // max(1, num_columns))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))
