"""The effect of a lower-precision forward pass on entropies and advantages, by comparing two passes over one batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_gtpo.token_values import TokenValues


@dataclass(frozen=True)
class ErrorBudget:
    """Differences between two forward passes, over action tokens.

    Fields:
        entropy_error_mean, entropy_error_p99: |ΔH| in nats.
        log_prob_error_mean, log_prob_error_p99: |Δ log π|.
        ratio_error: the mean of exp(|Δ log π|), the factor by which an importance ratio is off; 1 for no error.
        share_rank_correlation: Spearman's coefficient for the entropy shares; 1 if their order is the same.
        advantage_error_mean: the mean of |ΔA| divided by the standard deviation of the exact advantages.
        sign_flips: of tokens with a nonzero advantage in either pass, the fraction whose advantages differ in sign.
    """

    entropy_error_mean: float
    entropy_error_p99: float
    log_prob_error_mean: float
    log_prob_error_p99: float
    ratio_error: float
    share_rank_correlation: float
    advantage_error_mean: float
    sign_flips: float


@torch.no_grad()
def error_budget(
    exact: TokenValues,
    rough: TokenValues,
    mask: Tensor,
    shares: Callable[[Tensor], Tensor],
    advantages: Callable[[Tensor], Tensor],
) -> ErrorBudget:
    """Compare the values of a ``rough`` forward pass with the values of an ``exact`` one.

    Args:
        exact, rough: values of the same batch.
        mask: (B, T) bool, True at action tokens.
        shares: maps (B, T) entropies to their shares, of any shape that is the same for both passes.
        advantages: maps (B, T) entropies to (B, T) advantages.

    Raises:
        ValueError: there is no action token.
    """
    if not mask.any():
        raise ValueError("There is no action token to compare.")
    entropy_error = (rough.entropy[mask].double() - exact.entropy[mask].double()).abs()
    log_prob_error = (rough.log_probs[mask].double() - exact.log_probs[mask].double()).abs()
    before, after = (advantages(values.entropy)[mask].double() for values in (exact, rough))
    has_credit = (before != 0) | (after != 0)
    flipped = (before.sign() != after.sign())[has_credit]
    spread = before.std(correction=0) if before.min() < before.max() else torch.zeros(())
    return ErrorBudget(
        entropy_error_mean=entropy_error.mean().item(),
        entropy_error_p99=_quantile(entropy_error, 0.99),
        log_prob_error_mean=log_prob_error.mean().item(),
        log_prob_error_p99=_quantile(log_prob_error, 0.99),
        ratio_error=log_prob_error.exp().mean().item(),
        share_rank_correlation=rank_correlation(shares(exact.entropy).flatten(), shares(rough.entropy).flatten()),
        advantage_error_mean=((after - before).abs().mean() / spread).item() if spread > 0 else 0.0,
        sign_flips=flipped.double().mean().item() if flipped.numel() else 0.0,
    )


def rank_correlation(x: Tensor, y: Tensor) -> float:
    """Compute Spearman's coefficient of (N,) values; ties get their mean rank. 1 if neither varies, 0 if only one
    does."""
    x_ranks, y_ranks = _ranks(x), _ranks(y)
    x_spread, y_spread = x_ranks.std(correction=0).item(), y_ranks.std(correction=0).item()
    if x_spread == 0 or y_spread == 0:
        return float(x_spread == y_spread)
    return (x_ranks * y_ranks).mean().item() / (x_spread * y_spread)


def _ranks(values: Tensor) -> Tensor:
    """(N,) float64 ranks with a mean of 0; equal values share their mean rank."""
    _, place, count = values.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0)
    ranks = (last - (count - 1) / 2.0).double()[place]
    return ranks - ranks.mean()


def _quantile(values: Tensor, q: float) -> float:
    """The q-quantile of (N,) values, always one of them. ``torch.quantile`` is limited to 16 million values; this can
    go once https://github.com/pytorch/pytorch/issues/64947 is solved."""
    return values.kthvalue(max(1, math.ceil(q * values.numel()))).values.item()
