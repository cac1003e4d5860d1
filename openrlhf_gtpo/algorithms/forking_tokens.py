"""Forking tokens (arXiv 2506.01939): only the most uncertain tokens of a batch keep their policy loss.

Owns that selection, a baseline GTPO is compared with. The caller multiplies its loss mask by the result.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .checks import check_finite_tokens, check_mask, check_matrix
from .config import check_number


@torch.no_grad()
def forking_token_mask(entropy: Tensor, mask: Tensor, top_fraction: float = 0.2) -> Tensor:
    """Action tokens whose entropy is among the top ``top_fraction`` (rho) of the whole batch.

    The paper keeps tokens with H >= tau_rho; tau_rho here is the ceil(rho N)-th largest of the batch's N entropies, and
    tokens tied with it are kept, so more than rho may remain where entropies are equal.

    Args:
        entropy: (B, T) nats. mask: (B, T) bool.

    Returns:
        (B, T) bool, False outside ``mask``.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (with the row), or not 0 < top_fraction <= 1.
    """
    check_number("top_fraction", top_fraction, above=0, at_most=1)
    check_matrix("entropy", entropy)
    check_mask(mask, like=entropy, name="entropy")
    entropy = entropy.detach()
    check_finite_tokens("entropy", entropy, mask)
    tokens = entropy[mask]
    if tokens.numel() == 0:
        return mask.clone()
    # 1e-9: rho N is meant exactly, so 0.1 * 30 must not round up to 4 tokens.
    num_kept = max(1, math.ceil(top_fraction * tokens.numel() - 1e-9))
    threshold = tokens.kthvalue(tokens.numel() - num_kept + 1).values
    return (entropy >= threshold) & mask
