"""The grouping of rows, and the mean and std that normalize rewards.

The rows of a group need not be adjacent, groups may differ in size, and group ids may be any integers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_finite, check_rows, check_tokens
from .config import Mean, ShapingConfig

STD_EPS = 1e-9  # added to the std, as OpenRLHF's group_norm does


@dataclass(frozen=True)
class Rows:
    """R rows of a batch that are normalized together: the rows of one group, or the whole batch.

    Per-row values are (R, 1), so that they broadcast over (R, T) tokens.
    """

    index: Tensor | slice  # where the rows are in the batch
    entropy: Tensor  # (R, T) nats, as given: anything outside the mask, NaN included
    mask: Tensor  # (R, T) bool, True at action tokens
    outcome: Tensor  # (R, 1) float64
    won: Tensor  # (R, 1) bool, True for rows of O+
    penalty: Tensor  # (R, 1) float64, R(i); 0 without one
    group: Tensor  # (R, 1) int64, numbered from 0 without gaps

    @property
    def polarity(self) -> Tensor:
        """(R, 1) int64, one number for the rows of a group's O+ and another for the rows of its O-."""
        return 2 * self.group + self.won

    @property
    def has_tokens(self) -> Tensor:
        """(R, 1) bool, False for a row without action tokens."""
        return self.mask.any(-1, keepdim=True)

    def uniform(self, counted: Tensor) -> Tensor:
        """Mark, (R, 1) bool, the rows of groups whose ``counted`` (R, 1) rows all succeed or all fail."""
        success_rate = mean_by(self.won.double(), self.group, counted)
        return (success_rate == 0) | (success_rate == 1)


def success(outcome: Tensor, threshold: float = 1.0) -> Tensor:
    """Tell which rows belong to O+.

    Args:
        outcome: (B,) outcome rewards before any length penalty.
        threshold: rows with outcome >= threshold belong to O+. Both are compared in float32, the dtype of a run's
            rewards, or in the outcome's precision if that is coarser. In float64, a float32 reward of 0.9 would be
            below 0.9, and 0.7 + 0.2 + 0.1 would be below 1.

    Returns:
        (B,) bool.
    """
    if outcome.dtype == torch.float64:
        outcome = outcome.float()
    return outcome >= (outcome.new_tensor(threshold) if outcome.is_floating_point() else threshold)


def row_sets(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: ShapingConfig,
    length_penalty: Tensor | None = None,
) -> Iterator[Rows]:
    """Yield the rows that are normalized together: one group after another, or the whole batch at once.

    Going group by group keeps float64 tensors as small as a group, whatever the size of the batch.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (the message names the row), or a group of one row under
            ``scope="group"``.
    """
    check_tokens(mask, entropy=entropy)
    check_finite("entropy", entropy, mask)
    penalty = torch.zeros(len(mask)) if length_penalty is None else length_penalty
    for name, values in {"outcome": outcome, "group_ids": group_ids, "length_penalty": penalty}.items():
        check_rows(name, values, len(mask))
    outcome, penalty, group_ids = (values.to(mask.device) for values in (outcome, penalty, group_ids))
    won = success(outcome, config.success_threshold)
    sets: list[Tensor | slice] = [slice(None)]
    if config.scope == "group":
        sets = [(group_ids == group).nonzero()[:, 0] for group in group_ids.unique()]
    for index in sets:
        if isinstance(index, Tensor) and len(index) < 2:
            row = int(index)
            raise ValueError(
                f"group_ids: group {group_ids[row].item()} has only row {row}, but scope='group' normalizes over the "
                "rows of a group; sample at least 2 responses per prompt or, if the estimator has it, use "
                "scope='batch'."
            )
        yield Rows(
            index,
            entropy[index],
            mask[index],
            outcome=outcome[index, None].double(),
            won=won[index, None],
            penalty=penalty[index, None].double(),
            group=group_ids[index, None].unique(return_inverse=True)[1],
        )


def mean_by(values: Tensor, key: Tensor, counted: Tensor, mean: Mean = "arithmetic") -> Tensor:
    """Average ``values`` over all ``counted`` entries with the same key; 0, or 1 if geometric, where there are none.

    Args:
        values: (R, T) float64, read only where ``counted``.
        key: (R, T) int64, or (R, 1) if all entries of a row have the same.
        counted: (R, T) bool.

    Returns:
        float64 in the shape of ``key``.
    """
    total = (values.log() if mean == "geometric" else values).where(counted, 0)
    count = counted
    if key.shape[1] == 1:
        total, count = total.sum(-1, keepdim=True), count.sum(-1, keepdim=True)
    totals, counts = (torch.bincount(key.flatten(), weights=weights.flatten().double()) for weights in (total, count))
    means = totals / counts.clamp_min(1)
    return (means.exp() if mean == "geometric" else means)[key]


def mean_and_std(values: Tensor) -> tuple[Tensor, Tensor]:
    """Compute mean and unbiased std of (N,) float64 values, two scalars. No values have mean 0, and fewer than two
    have std 0.

    Equal values give exactly their value and std 0. A rounded mean and std would leave a residue, which the division
    by ``STD_EPS`` would make as large as an advantage.
    """
    if not len(values):
        return values.new_zeros(()), values.new_zeros(())
    lowest, highest = values.aminmax()
    if lowest == highest:
        return lowest, torch.zeros_like(lowest)
    std, mean = torch.std_mean(values)
    return mean, std


def normalization(reward: Tensor, counted: Tensor, won: Tensor, config: ShapingConfig) -> tuple[Tensor, Tensor]:
    """Compute the mean and std that normalize a row's rewards (Eq. 3, 8; Eq. 14, 15, 19; rev. Eq. 6).

    Args:
        reward: (R, T), or (R, 1) with one reward per row. In two-set variants a row of O+ has r+, and a row of O- has
            r-. Either is 0 on the rows of the other set. Those zeros count unless ``normalize_over`` is "polarity".
        counted: bool, the rewards that count.
        won: (R, 1) bool, True for rows of O+.

    Returns:
        mean and std, (R, 1) each, without ``STD_EPS``.
    """
    if not config.two_sets:
        mean, std = mean_and_std(reward[counted])
        return mean.expand(won.shape), std.expand(won.shape)
    zero_filled = config.normalize_over == "zero_filled"
    (positive_mean, positive_std), (negative_mean, negative_std) = (
        mean_and_std(reward.where(members, 0)[counted] if zero_filled else reward[counted & members])
        for members in (won, ~won)
    )
    return torch.where(won, positive_mean, negative_mean), torch.where(won, positive_std, negative_std)


def output_dtype(entropy: Tensor) -> torch.dtype:
    """float32, or float64 if the entropies are float64."""
    return torch.promote_types(entropy.dtype, torch.float32)
