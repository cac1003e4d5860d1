"""GRPO-S (arXiv 2508.04349): one reward per response, shaped by its mean entropy.

From the top: settings, reward formulas, entropy shares, rewards, advantages. To try another sequence reward, change
:func:`positive_sequence_reward` or :func:`negative_sequence_reward`. The loss must be the sequence-level one.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .checks import check_finite
from .config import Mean, NormaliseOver, Scope, Settings, number
from .groups import STD_EPS, RowMoments, Rows, mean_and_std, output_dtype, row_chunks, split_rows, sum_by
from .rewards import CreditParts, ShapedRewards


@dataclass(frozen=True)
class GRPOSConfig(Settings):
    """Sequence-level GRPO (GRPO-S): one reward per response.

    Fields:
        variant: ``v1`` (Eq. 5; with ``beta`` 0 and outcomes of 0 and 1 GRPO itself), ``v2`` (Eq. 17) or ``v3`` (rev.
            Eq. 9).
        beta: weight of the entropy share on O+ in ``v1`` and ``v2``.
        beta1, beta2: weights of outcome and entropy share in ``v3``.
        entropy_mean: how token entropies are averaged into a response's entropy.
        ratio_mean: how token importance ratios are averaged into a response's ratio (geometric is GSPO's).
        success_threshold, normalise_over, scope, shape_uniform_groups, entropy_eps: as in :class:`GTPOConfig`.

    Raises:
        ValueError: a setting out of range.
    """

    variant: Literal["v1", "v2", "v3"] = "v3"
    beta: float = number(0.1, at_least=0)
    beta1: float = number(1.0, at_least=0)
    beta2: float = number(0.1, at_least=0)
    success_threshold: float = 1.0
    entropy_mean: Mean = "arithmetic"
    ratio_mean: Mean = "arithmetic"
    normalise_over: NormaliseOver = "zero_filled"
    scope: Scope = "group"
    shape_uniform_groups: bool = False
    entropy_eps: float = number(1e-6, above=0)

    @property
    def two_sets(self) -> bool:
        """True if O+ and O- are normalized as two sets (Eq. 19) instead of one (Eq. 8)."""
        return self.variant in ("v2", "v3")


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


def sequence_reward_formula(config: GRPOSConfig, succeeded: bool) -> str:
    """The two rewards above as text, with {outcome} and {share} as placeholders."""
    outcome, share = config.beta1, config.beta2
    if not succeeded:
        return {"v2": "−{share}", "v3": f"−{outcome:g} − {share:g}·{{share}}"}.get(config.variant, "0")
    if config.variant in ("v1", "v2"):
        return f"{{outcome}} + {config.beta:g}·{{share}}"
    return f"{outcome:g}·{{outcome}} + {share:g}·{{share}}"


@torch.no_grad()
def sequence_entropy(entropy: Tensor, mask: Tensor, mean: Mean = "arithmetic", entropy_eps: float = 1e-6) -> Tensor:
    """The mean entropy of each response: H-hat of Eq. 5.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool.
        mean: ``arithmetic``, or ``geometric`` in log space.

    Returns:
        (B,) float64 nats, each >= ``entropy_eps``; a row without action tokens has ``entropy_eps``.
    """
    total = torch.zeros(len(entropy), dtype=torch.float64, device=entropy.device)
    for chunk in row_chunks(*entropy.shape):
        check_finite("entropy", entropy[chunk], mask[chunk], chunk.start)
        tokens = entropy[chunk].to(torch.float64, copy=True).clamp_min_(entropy_eps)
        if mean == "geometric":
            tokens.log_()
        total[chunk] = tokens.masked_fill_(~mask[chunk], 0).sum(-1)
    length = mask.sum(-1)
    per_row = total / length.clamp_min(1)
    if mean == "geometric":
        per_row.exp_()
    return torch.where(length > 0, per_row, entropy_eps)


def _shares(entropy: Tensor, mask: Tensor, rows: Rows, config: GRPOSConfig) -> tuple[Tensor, Tensor]:
    """(B,) float64 each: H-hat over its mean in O+ or 1 / H-hat over its mean in O- (Eq. 5, 17), and H-hat itself.

    A row without action tokens has no entropy: it is left out of the means and gets the neutral share 1. (With
    H-hat = entropy_eps it would take the whole share of its O-.)
    """
    per_row = sequence_entropy(entropy.detach(), mask, config.entropy_mean, config.entropy_eps)
    alive = rows.length > 0
    weight = torch.where(rows.success, per_row, per_row.reciprocal())
    total = sum_by(weight * alive, rows.polar_group, rows.num_polar_groups)
    count = sum_by(alive.double(), rows.polar_group, rows.num_polar_groups)
    return torch.where(alive, weight / total.where(alive, 1) * count, 1), per_row


@torch.no_grad()
def grpo_s_shares(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GRPOSConfig) -> Tensor:
    """The entropy shares that enter GRPO-S's rewards (Eq. 5, 17).

    Same arguments and errors as :func:`grpo_s_rewards`.

    Returns:
        (B,) float64, with a mean of 1 over the rows of an O+ or O-.
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold)
    return _shares(entropy, mask, rows, config)[0]


@torch.no_grad()
def grpo_s_rewards(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GRPOSConfig
) -> ShapedRewards:
    """Sequence rewards before normalization.

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; detached, and read only inside the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.

    Returns:
        (B,) ``positive`` and ``negative``; float32, or float64 if ``entropy`` is. A row without action tokens has no
        entropy: its share is the neutral 1, and it does not affect the shares of other rows.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a NaN or infinity (the message names the row).
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold)
    reward = _own_reward(_shares(entropy, mask, rows, config)[0], rows, config).to(output_dtype(entropy))
    # The reward of a one-set variant is already 0 on O-.
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
    """Sequence advantages, the same for all action tokens of a row (Eq. 8, 19). A row counts once, however long it is.

    Args:
        entropy, mask, outcome, group_ids, config: as for :func:`grpo_s_rewards`.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set; it never affects success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens counts in its group's statistics, as it does in GRPO.

    Raises:
        ValueError: as for :func:`grpo_s_rewards`, or a group of one row under ``scope="group"``.
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold, length_penalty)
    _, reward, mean, std, _ = _parts(entropy, mask, rows, config)
    if config.variant == "v1" and config.beta == 0:
        # This is GRPO. OpenRLHF's group_norm takes the difference and the quotient in the precision of the rewards,
        # and rounding at the same places makes the two agree bit for bit.
        reward, mean, std = (values.to(output_dtype(entropy)) for values in (reward, mean, std))
    advantage = (reward - mean) / (std + STD_EPS)
    if not config.shape_uniform_groups:
        advantage = advantage.masked_fill(rows.uniform(torch.ones_like(rows.success)), 0)
    return torch.where(mask, advantage.to(output_dtype(entropy))[:, None], 0)


@torch.no_grad()
def grpo_s_parts(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GRPOSConfig,
    length_penalty: Tensor | None = None,
) -> CreditParts:
    """The parts that :func:`grpo_s_advantages` combines, (B,) float64 each. Same arguments and errors."""
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold, length_penalty)
    return _parts(entropy, mask, rows, config)


def _parts(entropy: Tensor, mask: Tensor, rows: Rows, config: GRPOSConfig) -> CreditParts:
    share, row_entropy = _shares(entropy, mask, rows, config)
    reward = _own_reward(share, rows, config)
    moments = RowMoments(torch.ones_like(reward), reward, torch.zeros_like(reward))  # a row is one value
    mean, std = mean_and_std(moments, rows, two_sets=config.two_sets, scope=config.scope, over=config.normalise_over)
    return CreditParts(share, reward, mean, std, row_entropy)


def _own_reward(share: Tensor, rows: Rows, config: GRPOSConfig) -> Tensor:
    """A row's reward in its own set, with the length penalty, (B,) float64."""
    reward = torch.where(
        rows.success,
        positive_sequence_reward(share, rows.outcome, config),
        negative_sequence_reward(share, config),
    )
    return reward + rows.penalty
