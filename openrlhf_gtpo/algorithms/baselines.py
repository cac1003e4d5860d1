"""Two uses of entropy in the literature that GTPO is compared with: forking tokens and the entropy advantage bonus."""

import math

import torch
from torch import Tensor

from .checks import check_finite, check_tokens
from .config import check_number


@torch.no_grad()
def forking_token_mask(entropy: Tensor, mask: Tensor, top_fraction: float = 0.2) -> Tensor:
    """Action tokens that keep their policy loss: the top ``top_fraction`` (rho) of entropies (arXiv 2506.01939).

    The paper keeps tokens with H >= tau_rho; here tau_rho is the ceil(rho N)-th largest of the batch's N entropies;
    tokens tied with it are kept, so more than rho may remain where entropies are equal. Multiply the loss mask by it.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool.

    Returns:
        (B, T) bool, False outside ``mask``.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (with the row), or not 0 < top_fraction <= 1.
    """
    check_number("top_fraction", top_fraction, above=0, at_most=1)
    check_tokens(mask, entropy=entropy)
    check_finite("entropy", entropy, mask)
    tokens = entropy[mask]
    if tokens.numel() == 0:
        return mask.clone()
    # 1e-9: rho N is meant exactly, so 0.1 * 30 must not round up to 4 tokens.
    num_kept = max(1, math.ceil(top_fraction * tokens.numel() - 1e-9))
    threshold = tokens.kthvalue(tokens.numel() - num_kept + 1).values
    return (entropy >= threshold) & mask


def entropy_advantage_bonus(advantages: Tensor, entropy: Tensor, mask: Tensor, alpha: float, kappa: float) -> Tensor:
    """A + min(alpha H, |A| / kappa), with H detached; kappa > 1 keeps the sign of A (arXiv 2506.14758).

    Args:
        advantages: (B, T). entropy: (B, T) nats. mask: (B, T) bool.
        alpha: weight of the entropy, >= 0.
        kappa: the bonus is at most |A| / kappa.

    Returns:
        (B, T) in the dtype of ``advantages``, 0 where the mask is False.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (with the row), alpha < 0 or kappa <= 1.
    """
    check_number("alpha", alpha, at_least=0)
    check_number("kappa", kappa, above=1)
    check_tokens(mask, advantages=advantages, entropy=entropy)
    entropy = entropy.detach()
    check_finite("advantages", advantages.detach(), mask)
    check_finite("entropy", entropy, mask)
    bonus = torch.minimum(alpha * entropy.to(advantages.dtype), advantages.abs() / kappa)
    return (advantages + bonus).where(mask, 0)
