"""GRPO-S: one reward per response, shaped by its mean entropy (arXiv 2508.04349).

Owns the sequence reward formulas; to try another, change :func:`positive_sequence_reward` or
:func:`negative_sequence_reward`. Knows nothing of the loss; it must be the sequence-level one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_batch, check_row_vector
from .config import GRPOSConfig
from .groups import Rows, check_group_sizes, split_rows
from .normalise import STD_EPS, RowMoments, mean_and_std
from .rewards import ShapedRewards
from .shares import output_dtype, sequence_entropy, sequence_shares


def positive_sequence_reward(share: Tensor, outcome: Tensor, config: GRPOSConfig) -> Tensor:
    """r+ of rows of O+ from their entropy share: Eq. 5; rev. Eq. 9. (B,) and (B,) -> (B,)."""
    if config.variant in ("v1", "v2"):
        return outcome + config.beta * share
    return config.beta1 * outcome + config.beta2 * share


def negative_sequence_reward(share: Tensor, config: GRPOSConfig) -> Tensor:
    """The reward of rows of O- from their share of 1/H-hat: 0; Eq. 17; rev. Eq. 9. (B,) -> (B,)."""
    if config.variant == "v1":
        return torch.zeros_like(share)
    if config.variant == "v2":
        return -share
    return -config.beta1 - config.beta2 * share


@torch.no_grad()
def grpo_s_rewards(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GRPOSConfig
) -> ShapedRewards:
    """Sequence rewards before normalisation.

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; never backpropagated, read only in the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.

    Returns:
        (B,) ``positive`` and ``negative``; float32, or float64 if ``entropy`` is. A row without action tokens has no
        entropy: its share is the neutral 1, and the other rows' shares do not see it.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a NaN or infinity, with the row.
    """
    check_batch(entropy, mask, outcome, group_ids)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    reward = _own_reward(entropy, mask, rows, config).to(output_dtype(entropy))
    # The reward of a one-set variant is 0 on O- already.
    return ShapedRewards(reward * rows.success, reward * ~rows.success)


@torch.no_grad()
def grpo_s_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GRPOSConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Sequence advantages, the same for all action tokens of a row (Eq. 8, 19). A row counts once, however long.

    Args:
        entropy, mask, outcome, group_ids, config: as for :func:`grpo_s_rewards`.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set; it never decides success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens counts in its group's statistics, as it does in GRPO.

    Raises:
        ValueError: as :func:`grpo_s_rewards`, and a group of one row under ``scope="group"``.
    """
    check_batch(entropy, mask, outcome, group_ids)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    if config.scope == "group":
        check_group_sizes(rows, group_ids)
    reward = _own_reward(entropy, mask, rows, config)
    if length_penalty is not None:
        check_row_vector("length_penalty", length_penalty, entropy.shape[0])
        reward = reward + length_penalty.detach().to(reward)
    moments = RowMoments(torch.ones_like(reward), reward, torch.zeros_like(reward))
    mean, std = mean_and_std(moments, rows, config)
    if config.variant == "v1" and config.beta == 0:
        # This is GRPO. OpenRLHF's group_norm takes the difference and the quotient in the precision of the rewards,
        # and rounding at the same places makes the two agree bit for bit.
        reward, mean, std = (values.to(output_dtype(entropy)) for values in (reward, mean, std))
    advantage = (reward - mean) / (std + STD_EPS)
    if not config.shape_uniform_groups:
        advantage = advantage.masked_fill(rows.uniform, 0)
    return torch.where(mask, advantage.to(output_dtype(entropy))[:, None], 0)


def _own_reward(entropy: Tensor, mask: Tensor, rows: Rows, config: GRPOSConfig) -> Tensor:
    """A row's reward in its own set, (B,) float64."""
    per_row_entropy = sequence_entropy(entropy.detach(), mask, config.entropy_mean, config.entropy_eps)
    share = sequence_shares(per_row_entropy, rows)
    return torch.where(
        rows.success,
        positive_sequence_reward(share, rows.outcome, config),
        negative_sequence_reward(share, config),
    )
