"""The clipped policy loss: one term per token for GTPO, one per response for GRPO-S (Eq. 4, 7, 16, 18).

The loss is unreduced, so that a trainer can weight it and divide by the counts of its whole optimizer step. This file
knows nothing about entropies or rewards.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .checks import check_finite, check_tokens
from .config import Mean

Level = Literal["token", "sequence"]

# As in OpenRLHF, the log ratio is bounded before exp, so that far off-policy tokens give a huge but finite ratio. An
# infinite one would turn into NaN (inf * 0) in the loss or its gradient.
MAX_LOG_RATIO = 20.0


class Surrogate(NamedTuple):
    """The unreduced loss. A unit is an action token (token level) or a row with action tokens (sequence level)."""

    loss: Tensor  # (B, T) or (B,), 0 where there is no unit; differentiable in log_probs
    unit_mask: Tensor  # (B, T) or (B,) bool; divide loss by its sum over the optimizer step
    clipped: Tensor  # (B, T) or (B,) bool, True where the clipped surrogate was strictly smaller
    ratio: Tensor  # (B, T) or (B,) importance ratio before clipping, detached; 1 where there is no unit
    approx_kl: Tensor  # (B, T) -(log_probs - old_log_probs), detached, 0 outside the mask


def policy_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    level: Level,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    ratio_mean: Mean = "arithmetic",
    dual_clip: float | None = None,
) -> Surrogate:
    """Compute -min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) for every unit.

    Args:
        log_probs, old_log_probs: (B, T) of the sampled tokens under the policy and the old policy, read only inside
            the mask. Gradients flow only into ``log_probs``.
        advantages: (B, T); at sequence level the same at all action tokens of a row.
        mask: (B, T) bool.
        level: ``token`` (Eq. 4, 16) or ``sequence`` (Eq. 7, 18).
        clip_low, clip_high: the defaults are DAPO's clip-higher.
        ratio_mean: how token ratios are averaged into a response's ratio at sequence level: ``arithmetic`` (Eq. 6)
            or ``geometric`` (GSPO's).
        dual_clip: c > 1 bounds the loss of units with A < 0 by -c A (arXiv 1912.09729); None turns this off.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (the message names the row), or advantages that differ
            within a row at sequence level.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    if level == "token":
        ratio, unit_mask = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), mask
    else:
        ratio, unit_mask = sequence_ratio(log_probs, old_log_probs, mask, ratio_mean), mask.any(-1)
        advantages = sequence_advantage(advantages, mask)
    objective, clipped = clipped_objective(ratio, advantages, clip_low, clip_high, dual_clip)
    return Surrogate(-objective, unit_mask, clipped, ratio.detach(), -log_ratio.detach())


def clipped_objective(
    ratio: Tensor, advantages: Tensor, clip_low: float | Tensor, clip_high: float | Tensor, dual_clip: float | None
) -> tuple[Tensor, Tensor]:
    """Compute min(w A, clip(w, 1 - clip_low, 1 + clip_high) A) of any shape, and where the clipped term is smaller."""
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    objective = torch.min(unclipped, clipped)
    if dual_clip is not None:
        objective = torch.where(advantages < 0, torch.max(objective, dual_clip * advantages), objective)
    return objective, clipped.detach() < unclipped.detach()


def check_terms(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return (B, T) log w, differentiable in ``log_probs``, and advantages, both in at least float32, 0 outside the
    mask.

    Raises:
        ValueError: shapes that do not fit, or a NaN or infinity (the message names the row).
    """
    tensors = {"log_probs": log_probs, "old_log_probs": old_log_probs, "advantages": advantages}
    check_tokens(mask, **tensors)
    finite = torch.stack([values.detach().isfinite().where(mask, True).all() for values in tensors.values()])
    if not finite.all():  # the only device value that the host waits for
        for name, values in tensors.items():
            check_finite(name, values.detach(), mask)
    log_ratio = _log_ratio(log_probs, old_log_probs, mask)
    return log_ratio, advantages.detach().to(log_ratio.dtype).where(mask, 0)


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor, ratio_mean: Mean = "arithmetic") -> Tensor:
    """Compute the (B,) importance ratio per response (Eq. 6): its tokens' mean ratio, 1 for a row without action
    tokens.

    Args:
        log_probs, old_log_probs: (B, T); gradients flow only into ``log_probs``.
        mask: (B, T) bool.
        ratio_mean: ``arithmetic``, or ``geometric`` (GSPO's).
    """
    log_ratio, length = _log_ratio(log_probs, old_log_probs, mask), mask.sum(-1)
    if ratio_mean == "geometric":
        mean = log_ratio.sum(-1) / length.clamp_min(1)
        return mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().where(mask, 0)
    return (ratio.sum(-1) / length.clamp_min(1)).where(length > 0, 1)


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B, T) log w in at least float32, 0 outside the mask."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    return (log_probs.to(dtype) - old_log_probs.detach().to(dtype)).where(mask, 0)


def sequence_advantage(advantages: Tensor, mask: Tensor) -> Tensor:
    """Return the one advantage that all action tokens of a row share, (B,); 0 for a row without action tokens."""
    if advantages.shape[1] == 0:
        return advantages.new_zeros(advantages.shape[0])
    highest = advantages.masked_fill(~mask, -torch.inf).amax(-1)
    lowest = advantages.masked_fill(~mask, torch.inf).amin(-1)
    mixed = highest > lowest
    if mixed.any():
        row = int(mixed.nonzero()[0])
        raise ValueError(
            f"advantages of row {row} range from {lowest[row].item():g} to {highest[row].item():g}, but "
            "level='sequence' takes one advantage per row; use level='token' or sequence-level advantages."
        )
    return highest.where(mask.any(-1), 0)
