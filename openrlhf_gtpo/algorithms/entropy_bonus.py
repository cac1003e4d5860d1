"""The entropy advantage bonus (arXiv 2506.14758): uncertain tokens get a little more advantage.

Owns that formula, a baseline GTPO is compared with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .checks import check_finite_tokens, check_mask, check_matrix
from .config import check_number


def entropy_advantage_bonus(advantages: Tensor, entropy: Tensor, mask: Tensor, alpha: float, kappa: float) -> Tensor:
    """A + min(alpha H, |A| / kappa), with H detached; kappa > 1 keeps the sign of A.

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
    check_matrix("advantages", advantages)
    check_matrix("entropy", entropy)
    check_mask(mask, like=advantages, name="advantages")
    check_mask(mask, like=entropy, name="entropy")
    check_finite_tokens("advantages", advantages.detach(), mask)
    check_finite_tokens("entropy", entropy.detach(), mask)
    bonus = torch.minimum(alpha * entropy.detach().to(advantages.dtype), advantages.abs() / kappa)
    return (advantages + bonus).where(mask, 0)
