"""Two uses of entropy from the literature to compare GTPO with: forking tokens and the entropy advantage bonus.

Both change GRPO's advantages token by token, so they work with any token-level surrogate.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .checks import check_finite, check_tokens
from .config import Settings, setting
from .groups import STD_EPS, mean_and_std, output_dtype, row_sets
from .grpo_s import GRPOSConfig


@torch.no_grad()
def grpo_advantages(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, length_penalty: Tensor | None = None
) -> Tensor:
    """Compute GRPO's advantages (arXiv 2402.03300, section 4.1.2): (r - mean) / std over a group's rows, one per row.

    As in OpenRLHF's ``group_norm``, the std is the unbiased one plus ``STD_EPS``. Arguments, errors and return value
    are the same as for :func:`gtpo_advantages`, but the entropies are not used.
    """
    advantages = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    for rows in row_sets(entropy, mask, outcome, group_ids, GRPOSConfig(scope="group"), length_penalty):
        reward = rows.outcome + rows.penalty
        mean, std = mean_and_std(reward[:, 0])
        advantage = (reward - mean) / (std + STD_EPS)
        advantages[rows.index] = torch.where(rows.mask, advantage.to(advantages.dtype), 0)
    return advantages


@dataclass(frozen=True)
class ForkingTokensConfig(Settings):
    """Forking tokens (arXiv 2506.01939): train only on the most uncertain tokens."""

    top_fraction: float = setting(
        0.2,
        "fraction of the rollout's action tokens to train on: the tokens of highest entropy",
        above=0,
        at_most=1,
    )
    success_threshold: float = setting(1.0, "responses whose outcome reaches this count as successes in metrics")


def forking_tokens_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: ForkingTokensConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Keep GRPO's advantages at the tokens of :func:`forking_token_mask` and set the others to 0. Those tokens get no
    policy loss, but still count in means over tokens. The entropies are the old policy's, and the fraction is of the
    whole rollout, however it is split into optimizer steps. Only metrics read ``success_threshold``.

    Same arguments, errors and return value as :func:`gtpo_advantages`.
    """
    kept = forking_token_mask(entropy, mask, config.top_fraction)
    return grpo_advantages(entropy, mask, outcome, group_ids, length_penalty).where(kept, 0)


def forking_tokens_shares(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: ForkingTokensConfig
) -> Tensor:
    """Return (N,) values: 1 for each action token that is trained on, 0 for the others."""
    return forking_token_mask(entropy, mask, config.top_fraction)[mask].double()


@dataclass(frozen=True)
class EntropyBonusConfig(Settings):
    """Entropy advantage bonus (arXiv 2506.14758) on GRPO's advantages."""

    alpha: float = setting(0.4, "weight of a token's entropy", at_least=0)
    kappa: float = setting(2.0, "bounds the bonus by |A| / kappa; > 1, so that no advantage changes sign", above=1)
    success_threshold: float = setting(1.0, "responses whose outcome reaches this count as successes in metrics")


def entropy_bonus_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: EntropyBonusConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Add :func:`entropy_advantage_bonus` to GRPO's advantages. The entropies are the old policy's, however the
    rollout is split into optimizer steps. Only metrics read ``success_threshold``.

    Same arguments, errors and return value as :func:`gtpo_advantages`.
    """
    advantages = grpo_advantages(entropy, mask, outcome, group_ids, length_penalty)
    return entropy_advantage_bonus(advantages, entropy, mask, config.alpha, config.kappa)


def entropy_bonus_shares(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: EntropyBonusConfig
) -> Tensor:
    """Return the bonus of each action token, (N,)."""
    advantages = grpo_advantages(entropy, mask, outcome, group_ids).double()
    return (entropy_advantage_bonus(advantages, entropy, mask, config.alpha, config.kappa) - advantages)[mask]


@torch.no_grad()
def forking_token_mask(entropy: Tensor, mask: Tensor, top_fraction: float = 0.2) -> Tensor:
    """Select the action tokens that keep their policy loss: the top ``top_fraction`` rho by entropy (arXiv
    2506.01939).

    The paper keeps tokens with H >= tau_rho; here tau_rho is the ceil(rho N)-th largest of the batch's N entropies.
    Tokens tied with it are kept, so more than rho may remain if entropies are equal. The result multiplies the loss
    mask.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool.

    Returns:
        (B, T) bool, False outside ``mask``.

    Raises:
        ValueError: shapes that do not fit, or a NaN or infinity (the message names the row).
    """
    check_tokens(mask, entropy=entropy)
    check_finite("entropy", entropy, mask)
    tokens = entropy[mask]
    if tokens.numel() == 0:
        return mask.clone()
    # 1e-9: rho N is meant as an exact product, so 0.1 * 30 must not round up to 4 tokens.
    num_kept = max(1, math.ceil(top_fraction * tokens.numel() - 1e-9))
    threshold = tokens.kthvalue(tokens.numel() - num_kept + 1).values
    return (entropy >= threshold) & mask


def entropy_advantage_bonus(advantages: Tensor, entropy: Tensor, mask: Tensor, alpha: float, kappa: float) -> Tensor:
    """Compute A + min(alpha H, |A| / kappa), with H detached; kappa > 1 keeps the sign of A (arXiv 2506.14758).

    Args:
        advantages: (B, T). entropy: (B, T) nats. mask: (B, T) bool.
        alpha: weight of the entropy, >= 0.
        kappa: the bonus is at most |A| / kappa.

    Returns:
        (B, T) in the dtype of ``advantages``, 0 where the mask is False.

    Raises:
        ValueError: shapes that do not fit, or a NaN or infinity (the message names the row).
    """
    check_tokens(mask, advantages=advantages, entropy=entropy)
    entropy = entropy.detach()
    check_finite("advantages", advantages.detach(), mask)
    check_finite("entropy", entropy, mask)
    bonus = torch.minimum(alpha * entropy.to(advantages.dtype), advantages.abs() / kappa)
    return (advantages + bonus).where(mask, 0)
