"""GTPO: one reward and one advantage per action token (arXiv 2508.04349).

Owns the token reward formulas; to try another, change :func:`positive_token_reward` or
:func:`negative_token_reward`. Knows nothing of the loss; it must be the token-level one.

Departs from the paper in one default: zeros of the other polarity count in the mean and std (see ``GTPOConfig``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_batch, check_row_vector
from .config import GTPOConfig
from .groups import Rows, check_group_sizes, row_chunks, split_rows
from .normalise import STD_EPS, RowMoments, mean_and_std, token_moments
from .rewards import ShapedRewards
from .shares import TokenShares, output_dtype


def positive_token_reward(share: Tensor, outcome: Tensor, config: GTPOConfig) -> Tensor:
    """r+ of rows of O+ from their entropy share: Eq. 2; Eq. 11; rev. Eq. 3. (R, T) and (R, 1) -> (R, T)."""
    if config.variant == "v1":
        return outcome + config.alpha * share
    if config.variant in ("v1_clipped", "v2"):
        upper = max(1.0, config.alpha1 + config.alpha1 / config.kappa)
        return (config.alpha1 + config.alpha2 * share).clamp(1.0, upper)
    return config.alpha1 * outcome + config.alpha2 * share


def negative_token_reward(share: Tensor, config: GTPOConfig) -> Tensor:
    """The reward of rows of O- from their share of 1/H: 0; Eq. 13; rev. Eq. 5. (R, T) -> (R, T)."""
    if config.variant in ("v1", "v1_clipped"):
        return torch.zeros_like(share)
    if config.variant == "v2":
        return -share
    return -config.alpha1 - config.alpha2 * share


@torch.no_grad()
def gtpo_rewards(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig
) -> ShapedRewards:
    """Token rewards before normalisation.

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; never backpropagated, read only in the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.

    Returns:
        (B, T) ``positive`` and ``negative``, 0 where the mask is False; float32, or float64 if ``entropy`` is.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a NaN or infinity, with the row.
    """
    check_batch(entropy, mask, outcome, group_ids)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    shares = TokenShares(entropy, mask, rows, config)
    positive = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    negative = torch.zeros_like(positive)
    for chunk in row_chunks(*entropy.shape):
        reward, succeeded = _own_reward(shares, rows, chunk, config), rows.success[chunk, None]
        # The reward of a one-set variant is 0 on O- already.
        positive[chunk] = reward * succeeded
        negative[chunk] = reward * ~succeeded
    return ShapedRewards(positive, negative)


@torch.no_grad()
def gtpo_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GTPOConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Token advantages: shaped rewards, normalised (Eq. 3; Eq. 14, 15; rev. Eq. 6).

    Args:
        entropy, mask, outcome, group_ids, config: as for :func:`gtpo_rewards`.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set: to r in one-set variants (Eq. 12), to r+ on O+ and to r- on O- in two-set ones. It never
            decides success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens adds nothing to any statistic of tokens.

    Raises:
        ValueError: as :func:`gtpo_rewards`, and a group of one row under ``scope="group"``.
    """
    check_batch(entropy, mask, outcome, group_ids)
    if length_penalty is not None:
        check_row_vector("length_penalty", length_penalty, entropy.shape[0])
        length_penalty = length_penalty.detach().to(mask.device, torch.float64)
    rows = split_rows(mask, outcome, group_ids, config.success_threshold)
    if config.scope == "group":
        check_group_sizes(rows, group_ids)
    shares = TokenShares(entropy, mask, rows, config)

    # Rewards are computed twice rather than kept in float64: that costs less than the memory it saves.
    per_row = torch.zeros(3, entropy.shape[0], dtype=torch.float64, device=entropy.device)
    for chunk in row_chunks(*entropy.shape):
        reward = _own_reward(shares, rows, chunk, config, length_penalty)
        per_row[:, chunk] = torch.stack(token_moments(reward, mask[chunk]))
    mean, std = mean_and_std(RowMoments(*per_row), rows, config)

    scale = 1 / (std + STD_EPS)
    if not config.shape_uniform_groups:
        scale.masked_fill_(rows.uniform, 0)
    advantages = torch.empty_like(entropy, dtype=output_dtype(entropy))
    for chunk in row_chunks(*entropy.shape):
        reward = _own_reward(shares, rows, chunk, config, length_penalty)
        reward.sub_(mean[chunk, None]).mul_(scale[chunk, None])
        advantages[chunk] = reward.masked_fill_(~mask[chunk], 0)
    return advantages


def _own_reward(
    shares: TokenShares, rows: Rows, chunk: slice, config: GTPOConfig, length_penalty: Tensor | None = None
) -> Tensor:
    """A row's reward in its own set, (R, T) float64, 0 where the mask is False."""
    share, succeeded = shares(chunk), rows.success[chunk, None]
    reward = torch.where(
        succeeded,
        positive_token_reward(share, rows.outcome[chunk, None], config),
        negative_token_reward(share, config),
    )
    if length_penalty is not None:
        reward += length_penalty[chunk, None]
    return reward.masked_fill_(~shares.mask[chunk], 0)
