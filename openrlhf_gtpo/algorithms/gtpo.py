"""GTPO (arXiv 2508.04349): one reward and one advantage per action token.

From the top: settings, reward formulas, entropy shares, rewards, advantages. To try another token reward, change
:func:`positive_token_reward` or :func:`negative_token_reward`; how an entropy becomes a token's weight in its share is
in :class:`TokenShares`. The loss must be the token-level one.

Zeros of the other polarity count in the mean and std (Eq. 14) unless ``normalise_over`` says otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .checks import check_finite
from .config import Mean, NormaliseOver, Scope, Settings, check_number, number
from .groups import STD_EPS, RowMoments, Rows, mean_and_std, output_dtype, row_chunks, split_rows, sum_by
from .rewards import CreditParts, ShapedRewards


@dataclass(frozen=True)
class GTPOConfig(Settings):
    """Group Token Policy Optimization: one reward per action token.

    Fields:
        variant: ``v1`` (Eq. 2), ``v1_clipped`` (Eq. 11, 12), ``v2`` (Eq. 13) or ``v3`` (rev. Eq. 3, 5).
        alpha: weight of the entropy share in ``v1``.
        alpha1: weight of the outcome in the other variants (default: 1 in ``v3``; 0.9 in ``v1_clipped`` and ``v2``,
            where Eq. 11 requires alpha1 + alpha2 = 1, so giving one of them sets the other).
        alpha2: weight of the entropy share in the other variants (default: 0.1).
        kappa: ``v1_clipped`` and ``v2`` clip the token reward of O+ to [1, alpha1 + alpha1 / kappa]; must be > 1.
        success_threshold: rows with outcome >= this form O+, the others O-.
        compare: what a token's entropy is compared with: the tokens at the same ``position`` of its group, all tokens
            of its ``response``, or those of the whole ``group``; each within its own polarity.
        entropy_mean: the mean in the share's denominator.
        normalise_over: in the two-set variants ``v2`` and ``v3``, normalize over all rows, with the other polarity as
            zeros (``zero_filled``), or only over the rows of one ``polarity``. No effect on the other variants.
        scope: rows over which mean and std are taken: the ``group`` or the ``batch``.
        shape_uniform_groups: keep advantages of groups whose rows all succeed or all fail (otherwise they are 0).
        entropy_eps: entropies are clamped from below at this many nats before anything is computed from them.

    Raises:
        ValueError: a setting out of range; in variants that clip, alpha1 + alpha2 != 1 or alpha1 + alpha1 / kappa < 1.
    """

    variant: Literal["v1", "v1_clipped", "v2", "v3"] = "v3"
    alpha: float = number(0.1, at_least=0)
    alpha1: float = None  # type: ignore[assignment]  # a float after construction; the default depends on variant
    alpha2: float = None  # type: ignore[assignment]
    kappa: float = number(2.0, above=1)
    success_threshold: float = 1.0
    compare: Literal["position", "response", "group"] = "position"
    entropy_mean: Mean = "arithmetic"
    normalise_over: NormaliseOver = "zero_filled"
    scope: Scope = "group"
    shape_uniform_groups: bool = False
    entropy_eps: float = number(1e-6, above=0)

    def __post_init__(self) -> None:
        clips = self.variant in ("v1_clipped", "v2")
        given = {name: getattr(self, name) for name in ("alpha1", "alpha2") if getattr(self, name) is not None}
        for name, value in given.items():
            check_number(name, value, at_least=0, at_most=1 if clips else math.inf)
        filled = {"alpha1": 0.9 if clips else 1.0, "alpha2": 0.1, **given}
        if clips and len(given) == 1:
            filled["alpha2" if "alpha1" in given else "alpha1"] = 1 - sum(given.values())
        for name, value in filled.items():
            object.__setattr__(self, name, value)
        super().__post_init__()
        if not clips:
            return
        total, upper = self.alpha1 + self.alpha2, self.alpha1 + self.alpha1 / self.kappa
        if not math.isclose(total, 1, abs_tol=1e-9):
            raise ValueError(
                f"alpha1={self.alpha1:g}, alpha2={self.alpha2:g} sum to {total:g}, but variant={self.variant!r} needs "
                "alpha1 + alpha2 = 1 (Eq. 11); give only one of them and the other follows."
            )
        if upper < 1 - 1e-9:
            raise ValueError(
                f"alpha1={self.alpha1:g}, kappa={self.kappa:g} give alpha1 + alpha1/kappa = {upper:g} < 1, but "
                f"variant={self.variant!r} clips to [1, alpha1 + alpha1/kappa] (Eq. 11) and so needs "
                "alpha1 + alpha1/kappa >= 1; raise alpha1 or lower kappa."
            )

    @property
    def two_sets(self) -> bool:
        """True if O+ and O- are normalized as two sets (Eq. 14, 15) instead of one (Eq. 3)."""
        return self.variant in ("v2", "v3")


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


def token_reward_formula(config: GTPOConfig, succeeded: bool) -> str:
    """The two rewards above as text, with {outcome} and {share} as placeholders."""
    outcome, share = config.alpha1, config.alpha2
    if not succeeded:
        return {"v2": "−{share}", "v3": f"−{outcome:g} − {share:g}·{{share}}"}.get(config.variant, "0")
    if config.variant == "v1":
        return f"{{outcome}} + {config.alpha:g}·{{share}}"
    if config.variant in ("v1_clipped", "v2"):
        upper = max(1.0, outcome + outcome / config.kappa)
        return f"clip({outcome:g} + {share:g}·{{share}}, 1, {upper:g})"
    return f"{outcome:g}·{{outcome}} + {share:g}·{{share}}"


class TokenShares:
    """share_{i,t} of a batch (Eq. 2, 13): a token's uncertainty relative to others of its polarity, by slices of rows.

    A token of O+ has weight H and a token of O- has weight 1/H, in float64, with H detached and clamped from below at
    ``entropy_eps``; a token's share is its weight over the mean weight of what it is compared with. Position t counts
    action tokens, not columns. When tokens are compared at the same position, the mean weights are kept in a table of
    (O+ and O- of every group, positions), so that no (B, T) float64 tensor is ever held.
    """

    def __init__(self, entropy: Tensor, mask: Tensor, rows: Rows, config: GTPOConfig) -> None:
        self.entropy, self.mask, self.rows, self.config = entropy.detach(), mask, rows, config
        num_rows, num_columns = entropy.shape
        self.width = num_columns + 1  # positions 1..T; 0 is "before the first action token" and never counts
        by_position = config.compare == "position"
        size = rows.num_polar_groups * self.width if by_position else num_rows
        sums = torch.zeros(size, dtype=torch.float64, device=entropy.device)
        count = torch.zeros(size, dtype=torch.int32, device=entropy.device)
        for chunk in row_chunks(num_rows, num_columns):
            check_finite("entropy", self.entropy[chunk], mask[chunk], chunk.start)
            weight = self._weight(chunk)
            if config.entropy_mean == "geometric":
                weight.log_()
            weight.masked_fill_(~mask[chunk], 0)
            if by_position:
                key = self._key(chunk).reshape(-1)
                sums.scatter_add_(0, key, weight.reshape(-1))
                count.scatter_add_(0, key, mask[chunk].int().reshape(-1))
            else:
                sums[chunk], count[chunk] = weight.sum(-1), rows.length[chunk].int()
        if config.compare == "group":
            sums, count = (sum_by(values, rows.polar_group, rows.num_polar_groups) for values in (sums, count))
        empty = count == 0
        self.mean = sums.div_(count.clamp_min_(1))
        if config.entropy_mean == "geometric":
            self.mean.exp_()
        self.mean.masked_fill_(empty, 1)

    def __call__(self, chunk: slice) -> Tensor:
        """(rows of ``chunk``, T) float64, 0 where the mask is False."""
        weight = self._weight(chunk)
        weight /= self.mean.take(self._key(chunk))
        return weight.masked_fill_(~self.mask[chunk], 0)

    def _weight(self, chunk: slice) -> Tensor:
        entropy = self.entropy[chunk].to(torch.float64, copy=True).clamp_min_(self.config.entropy_eps)
        entropy.masked_fill_(~self.mask[chunk], 1)  # padding may hold anything, NaN included
        return torch.where(self.rows.success[chunk, None], entropy, entropy.reciprocal())

    def _key(self, chunk: slice) -> Tensor:
        """Indices into ``self.mean`` of what tokens are compared with: (R, T) into the table, or (R, 1) by row."""
        if self.config.compare != "position":
            return torch.arange(chunk.start, chunk.stop, device=self.mask.device)[:, None]
        key = self.mask[chunk].cumsum(-1)
        key += self.rows.polar_group[chunk, None] * self.width
        return key


@torch.no_grad()
def gtpo_shares(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig
) -> tuple[Tensor, Tensor]:
    """The entropy shares that enter GTPO's rewards, for metrics and plots.

    Same arguments and errors as :func:`gtpo_rewards`.

    Returns:
        share+ and share- (Eq. 2, 13), (B, T) each: share+ is 0 on rows of O-, share- is 0 on rows of O+, and both are
        0 outside the mask. With the arithmetic mean, their mean over the tokens that are compared is 1.
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold)
    return _by_polarity(TokenShares(entropy, mask, rows, config), rows, entropy)


def shares_of_tokens(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig) -> Tensor:
    """The shares of all action tokens, (N,), row by row; see :func:`gtpo_shares`."""
    positive, negative = gtpo_shares(entropy, mask, outcome, group_ids, config)
    return (positive + negative)[mask]


@torch.no_grad()
def gtpo_rewards(
    entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig
) -> ShapedRewards:
    """Token rewards before normalization.

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; detached, and read only inside the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.

    Returns:
        (B, T) ``positive`` and ``negative``, 0 where the mask is False; float32, or float64 if ``entropy`` is.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a NaN or infinity (the message names the row).
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold)
    shares = TokenShares(entropy, mask, rows, config)
    # The reward of a one-set variant is already 0 on O-.
    return ShapedRewards(*_by_polarity(lambda chunk: _own_reward(shares, chunk), rows, entropy))


@torch.no_grad()
def gtpo_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GTPOConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Token advantages: shaped rewards, normalized (Eq. 3; Eq. 14, 15; rev. Eq. 6).

    Args:
        entropy, mask, outcome, group_ids, config: as for :func:`gtpo_rewards`.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set: to r in one-set variants (Eq. 12), to r+ on O+ and to r- on O- in two-set ones. It never
            affects success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens adds nothing to the token statistics.

    Raises:
        ValueError: as for :func:`gtpo_rewards`, or a group of one row under ``scope="group"``.
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold, length_penalty)
    shares = TokenShares(entropy, mask, rows, config)
    # Rewards are computed twice rather than kept in float64: that costs less than the memory it saves.
    mean, std = _mean_and_std(shares)

    scale = 1 / (std + STD_EPS)
    if not config.shape_uniform_groups:
        scale.masked_fill_(rows.uniform(rows.length > 0), 0)
    advantages = torch.empty_like(entropy, dtype=output_dtype(entropy))
    for chunk in row_chunks(*entropy.shape):
        reward = _own_reward(shares, chunk)
        reward.sub_(mean[chunk, None]).mul_(scale[chunk, None])
        advantages[chunk] = reward.masked_fill_(~mask[chunk], 0)
    return advantages


@torch.no_grad()
def gtpo_parts(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GTPOConfig,
    length_penalty: Tensor | None = None,
) -> CreditParts:
    """The shares, rewards and statistics that :func:`gtpo_advantages` combines, for tools that display them.

    Same arguments and errors.

    Returns:
        share and reward, (B, T), 0 where the mask is False; mean and std, (B,); all float64.
    """
    rows = split_rows(entropy, mask, outcome, group_ids, config.success_threshold, length_penalty)
    shares = TokenShares(entropy, mask, rows, config)
    share, reward = (torch.empty_like(entropy, dtype=torch.float64) for _ in range(2))
    for chunk in row_chunks(*entropy.shape):
        share[chunk], reward[chunk] = shares(chunk), _own_reward(shares, chunk)
    return CreditParts(share, reward, *_mean_and_std(shares))


def _mean_and_std(shares: TokenShares) -> tuple[Tensor, Tensor]:
    """The mean and std that a row's token rewards are normalized with, (B,) float64 each."""
    rows, mask, config = shares.rows, shares.mask, shares.config
    per_row = torch.zeros(3, len(mask), dtype=torch.float64, device=mask.device)
    for chunk in row_chunks(*mask.shape):
        reward, count = _own_reward(shares, chunk), rows.length[chunk].double()
        mean = reward.sum(-1) / count.clamp_min(1)
        squares = (reward - mean[:, None]).square_().masked_fill_(~mask[chunk], 0).sum(-1)
        per_row[:, chunk] = torch.stack([count, mean, squares])
    return mean_and_std(
        RowMoments(*per_row), rows, two_sets=config.two_sets, scope=config.scope, over=config.normalise_over
    )


def _own_reward(shares: TokenShares, chunk: slice) -> Tensor:
    """Token rewards of the rows of ``chunk``, each in its own set, with the length penalty; (R, T) float64, 0 where
    the mask is False."""
    share, rows, config = shares(chunk), shares.rows, shares.config
    reward = torch.where(
        rows.success[chunk, None],
        positive_token_reward(share, rows.outcome[chunk, None], config),
        negative_token_reward(share, config),
    )
    return reward.add_(rows.penalty[chunk, None]).masked_fill_(~shares.mask[chunk], 0)


def _by_polarity(values: Callable[[slice], Tensor], rows: Rows, entropy: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) ``values`` on the rows of O+, and those on the rows of O-, 0 elsewhere, in the output's dtype."""
    positive = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    negative = torch.zeros_like(positive)
    for chunk in row_chunks(*entropy.shape):
        both, succeeded = values(chunk), rows.success[chunk, None]
        positive[chunk], negative[chunk] = both * succeeded, both * ~succeeded
    return positive, negative
