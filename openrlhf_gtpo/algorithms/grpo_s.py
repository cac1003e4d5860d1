"""GRPO-S (arXiv 2508.04349): one reward per response, shaped by its mean entropy.

From the top: settings, shares, rewards, advantages. R rows are normalized together: a group, or the batch (``scope``).
To try another sequence reward, change :func:`positive_sequence_reward` or :func:`negative_sequence_reward`. The loss
must be the sequence-level one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .config import Mean, ShapingConfig, setting
from .groups import STD_EPS, Rows, mean_by, normalization, output_dtype, row_sets
from .rewards import CreditParts


@dataclass(frozen=True, kw_only=True)
class GRPOSConfig(ShapingConfig):
    """Sequence-level GRPO (GRPO-S): one reward per response.

    Raises:
        ValueError: a setting out of range.
    """

    variant: Literal["v1", "v2", "v3"] = setting(
        "v3",
        "sequence reward: the paper's Eq. 5 (v1; GRPO's with beta 0 and outcomes of 0 and 1), Eq. 17 (v2), or its "
        "revision's (v3)",
    )
    beta: float = setting(0.1, "weight of the entropy share on O+", variants=("v1", "v2"), at_least=0)
    beta1: float = setting(1.0, "weight of the outcome", variants=("v3",), at_least=0)
    beta2: float = setting(0.1, "weight of the entropy share", variants=("v3",), at_least=0)
    entropy_mean: Mean = setting("arithmetic", "how a response's token entropies are averaged")
    ratio_mean: Mean = setting(
        "arithmetic", "how a response's token importance ratios are averaged; geometric is GSPO's"
    )


def sequence_entropy(rows: Rows, config: GRPOSConfig) -> Tensor:
    """Compute the mean entropy H-hat of each response (Eq. 5), (R, 1) float64 nats; ``entropy_eps`` without action
    tokens."""
    entropy = rows.entropy.double().clamp_min(config.entropy_eps)  # (R, T)
    row = torch.arange(len(rows.mask), device=rows.mask.device)[:, None]
    return mean_by(entropy, row, rows.mask, config.entropy_mean).where(rows.has_tokens, config.entropy_eps)


def sequence_shares(entropy: Tensor, rows: Rows) -> Tensor:
    """Compute each response's share, (R, 1): H-hat over its mean in O+, or 1 / H-hat over its mean in O- (Eq. 5, 17).

    A row without action tokens has no entropy. It is left out of the means and gets the neutral share 1. (With H-hat =
    entropy_eps it would take the whole share of its O-.)
    """
    weight = torch.where(rows.won, entropy, 1 / entropy)
    return (weight / mean_by(weight, rows.polarity, rows.has_tokens)).where(rows.has_tokens, 1)


def positive_sequence_reward(share: Tensor, outcome: Tensor, config: GRPOSConfig) -> Tensor:
    """Compute r+, the reward of rows of O+, from their entropy share: Eq. 5; rev. Eq. 9. (B,) and (B,) -> (B,)."""
    if config.variant in ("v1", "v2"):
        return outcome + config.beta * share
    return config.beta1 * outcome + config.beta2 * share


def negative_sequence_reward(share: Tensor, config: GRPOSConfig) -> Tensor:
    """Compute the reward of rows of O- from their share of 1/H-hat: 0; Eq. 17; rev. Eq. 9. (B,) -> (B,)."""
    if config.variant == "v1":
        return torch.zeros_like(share)
    if config.variant == "v2":
        return -share
    return -config.beta1 - config.beta2 * share


def sequence_reward_formula(config: GRPOSConfig, succeeded: bool) -> str:
    """Write the two rewards above as text, with {outcome} and {share} as placeholders."""
    outcome, share = config.beta1, config.beta2
    if not succeeded:
        return {"v2": "−{share}", "v3": f"−{outcome:g} − {share:g}·{{share}}"}.get(config.variant, "0")
    if config.variant in ("v1", "v2"):
        return f"{{outcome}} + {config.beta:g}·{{share}}"
    return f"{outcome:g}·{{outcome}} + {share:g}·{{share}}"


def _credit(rows: Rows, config: GRPOSConfig) -> CreditParts:
    """The parts of the advantages of R rows, (R, 1) float64 each."""
    entropy = sequence_entropy(rows, config)
    share = sequence_shares(entropy, rows)
    positive = positive_sequence_reward(share, rows.outcome, config)
    negative = negative_sequence_reward(share, config)
    reward = torch.where(rows.won, positive, negative) + rows.penalty
    mean, std = normalization(reward, torch.ones_like(rows.won), rows.won, config)
    return CreditParts(share, reward, mean, std, entropy)


@torch.no_grad()
def grpo_s_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GRPOSConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Compute sequence advantages, the same for all action tokens of a row (Eq. 8, 19). A row counts once, however
    long.

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; detached, and read only inside the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set. It never affects success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens counts in its group's statistics, as it does in GRPO.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (the message names the row), or a group of one row under
            ``scope="group"``.
    """
    advantages = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    for rows in row_sets(entropy, mask, outcome, group_ids, config, length_penalty):
        _, reward, mean, std, _ = _credit(rows, config)
        if config.variant == "v1" and config.beta == 0:
            # This is GRPO. OpenRLHF's group_norm subtracts and divides in the precision of the rewards. Rounding in
            # the same places makes the two agree bit for bit.
            reward, mean, std = (values.to(advantages.dtype) for values in (reward, mean, std))
        advantage = (reward - mean) / (std + STD_EPS)
        if not config.shape_uniform_groups:
            advantage = advantage.masked_fill(rows.uniform(torch.ones_like(rows.won)), 0)
        advantages[rows.index] = torch.where(rows.mask, advantage.to(advantages.dtype), 0)
    return advantages


@torch.no_grad()
def grpo_s_parts(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GRPOSConfig,
    length_penalty: Tensor | None = None,
) -> CreditParts:
    """Compute the parts that :func:`grpo_s_advantages` combines, (B,) float64 each. Same arguments and errors."""
    parts = torch.zeros(len(CreditParts._fields), len(mask), dtype=torch.float64, device=mask.device)
    for rows in row_sets(entropy, mask, outcome, group_ids, config, length_penalty):
        parts[:, rows.index] = torch.cat(_credit(rows, config), dim=-1).T
    return CreditParts(*parts)


def grpo_s_shares(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GRPOSConfig) -> Tensor:
    """Compute the entropy shares in GRPO-S's rewards (Eq. 5, 17), (B,), with a mean of 1 over the rows of an O+ or O-.

    Same arguments and errors as :func:`grpo_s_advantages`.
    """
    return grpo_s_parts(entropy, mask, outcome, group_ids, config).share
