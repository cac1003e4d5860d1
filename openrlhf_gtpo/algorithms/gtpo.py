"""GTPO (arXiv 2508.04349): one reward and one advantage per action token.

From the top: settings, shares, rewards, advantages. R rows are normalized together: a group, or the batch (``scope``).
To try another token reward, change :func:`positive_token_reward` or :func:`negative_token_reward`.
:func:`token_shares` turns an entropy into a token's share. The loss must be the token-level one.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .config import Mean, ShapingConfig, check_number, setting
from .groups import STD_EPS, Rows, mean_by, normalization, output_dtype, row_sets
from .rewards import CreditParts

CLIPPED = ("v1_clipped", "v2")  # variants that clip the token reward of O+ (Eq. 11)


@dataclass(frozen=True, kw_only=True)
class GTPOConfig(ShapingConfig):
    """Group Token Policy Optimization: one reward per action token.

    Raises:
        ValueError: a setting out of range; in variants that clip, alpha1 + alpha2 != 1 or alpha1 + alpha1 / kappa < 1.
    """

    variant: Literal["v1", "v1_clipped", "v2", "v3"] = setting(
        "v3",
        "token reward: the paper's Eq. 2 (v1), Eq. 11 and 12 (v1_clipped), Eq. 13 (v2), or its revision's (v3)",
    )
    alpha: float = setting(0.1, "weight of the entropy share", variants=("v1",), at_least=0)
    # Floats after construction. Their defaults depend on the variant: 1 and 0.1 in v3, 0.9 and 0.1 where it clips.
    alpha1: float = setting(
        None, "weight of the outcome; in variants that clip, alpha1 + alpha2 = 1", variants=(*CLIPPED, "v3")
    )
    alpha2: float = setting(None, "weight of the entropy share", variants=(*CLIPPED, "v3"))
    kappa: float = setting(
        2.0, "clips the token rewards of O+ to [1, alpha1 + alpha1 / kappa]", variants=CLIPPED, above=1
    )
    compare: Literal["position", "response", "group"] = setting(
        "position",
        "what a token's entropy is compared with: its position in the group, its whole response, or its whole group; "
        "each within its own polarity",
    )
    entropy_mean: Mean = setting("arithmetic", "mean in the denominator of the entropy share")

    def __post_init__(self) -> None:
        clips = self.variant in CLIPPED
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
                f"alpha1={self.alpha1:g}, alpha2={self.alpha2:g} sum to {total:g}, but variant={self.variant!r} "
                "needs alpha1 + alpha2 = 1 (Eq. 11); give only one of them and the other follows."
            )
        if upper < 1 - 1e-9:
            raise ValueError(
                f"alpha1={self.alpha1:g}, kappa={self.kappa:g} give alpha1 + alpha1/kappa = {upper:g} < 1, but "
                f"variant={self.variant!r} clips to [1, alpha1 + alpha1/kappa] (Eq. 11) and so needs alpha1 + "
                "alpha1/kappa >= 1; raise alpha1 or lower kappa."
            )


def token_shares(rows: Rows, config: GTPOConfig) -> Tensor:
    """Compute each token's share: its weight over the mean weight of the tokens it is compared with (Eq. 2, 13).

    The weight is H in O+ and 1/H in O-. Position t counts action tokens, not columns. Returns (R, T) float64.
    """
    entropy = rows.entropy.double().clamp_min(config.entropy_eps).where(rows.mask, 1)  # H, (R, T)
    weight = torch.where(rows.won, entropy, 1 / entropy)
    position = rows.mask.cumsum(-1)  # t, (R, T): 1 at a row's first action token
    compared = {
        "position": rows.polarity * (rows.mask.shape[1] + 1) + position,
        "response": torch.arange(len(rows.mask), device=rows.mask.device)[:, None],
        "group": rows.polarity,
    }[config.compare]
    mean = mean_by(weight, compared, rows.mask, config.entropy_mean)
    return (weight / mean).where(rows.mask, 0)


def positive_token_reward(share: Tensor, outcome: Tensor, config: GTPOConfig) -> Tensor:
    """Compute r+, the reward of rows of O+, from their entropy share: Eq. 2; Eq. 11; rev. Eq. 3.

    (R, T) and (R, 1) -> (R, T).
    """
    if config.variant == "v1":
        return outcome + config.alpha * share
    if config.variant in CLIPPED:
        upper = max(1.0, config.alpha1 + config.alpha1 / config.kappa)
        return (config.alpha1 + config.alpha2 * share).clamp(1.0, upper)
    return config.alpha1 * outcome + config.alpha2 * share


def negative_token_reward(share: Tensor, config: GTPOConfig) -> Tensor:
    """Compute the reward of rows of O- from their share of 1/H: 0; Eq. 13; rev. Eq. 5. (R, T) -> (R, T)."""
    if config.variant in ("v1", "v1_clipped"):
        return torch.zeros_like(share)
    if config.variant == "v2":
        return -share
    return -config.alpha1 - config.alpha2 * share


def token_reward_formula(config: GTPOConfig, succeeded: bool) -> str:
    """Write the two rewards above as text, with {outcome} and {share} as placeholders."""
    outcome, share = config.alpha1, config.alpha2
    if not succeeded:
        return {"v2": "−{share}", "v3": f"−{outcome:g} − {share:g}·{{share}}"}.get(config.variant, "0")
    if config.variant == "v1":
        return f"{{outcome}} + {config.alpha:g}·{{share}}"
    if config.variant in CLIPPED:
        upper = max(1.0, outcome + outcome / config.kappa)
        return f"clip({outcome:g} + {share:g}·{{share}}, 1, {upper:g})"
    return f"{outcome:g}·{{outcome}} + {share:g}·{{share}}"


def _credit(rows: Rows, config: GTPOConfig) -> CreditParts:
    """The parts of the advantages of R rows: share and reward (R, T), mean and std (R, 1), all float64."""
    share = token_shares(rows, config)
    positive = positive_token_reward(share, rows.outcome, config)
    negative = negative_token_reward(share, config)
    reward = (torch.where(rows.won, positive, negative) + rows.penalty).where(rows.mask, 0)
    mean, std = normalization(reward, rows.mask, rows.won, config)
    return CreditParts(share, reward, mean, std)


@torch.no_grad()
def gtpo_shares(entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor, config: GTPOConfig) -> Tensor:
    """Compute the entropy shares in GTPO's rewards (Eq. 2, 13), (N,), one for each action token, row by row.

    Same arguments and errors as :func:`gtpo_advantages`. With the arithmetic mean, the mean share over the compared
    tokens is 1.
    """
    shares = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    for rows in row_sets(entropy, mask, outcome, group_ids, config):
        shares[rows.index] = token_shares(rows, config).to(shares.dtype)
    return shares[mask]


@torch.no_grad()
def gtpo_advantages(
    entropy: Tensor,
    mask: Tensor,
    outcome: Tensor,
    group_ids: Tensor,
    config: GTPOConfig,
    length_penalty: Tensor | None = None,
) -> Tensor:
    """Compute token advantages: shaped rewards, normalized (Eq. 3; Eq. 14, 15; rev. Eq. 6).

    Args:
        entropy: (B, T) entropy of the old policy at each token, in nats; detached, and read only inside the mask.
        mask: (B, T) bool, True at action tokens; holes allowed.
        outcome: (B,) outcome rewards before any length penalty.
        group_ids: (B,) int, equal for the responses to one prompt; rows of a group need not be adjacent.
        config: variant and options.
        length_penalty: (B,) R(i), usually from :func:`length_penalty`, or None. Added after shaping to a row's reward
            in its own set: to r in one-set variants (Eq. 12), to r+ on O+ and to r- on O- in two-set ones. It never
            affects success.

    Returns:
        (B, T), 0 where the mask is False and in uniform groups (unless ``shape_uniform_groups``); float32, or float64
        if ``entropy`` is. A row without action tokens adds nothing to the token statistics.

    Raises:
        ValueError: shapes that do not fit, a NaN or infinity (the message names the row), or a group of one row
            under ``scope="group"``.
    """
    advantages = torch.zeros_like(entropy, dtype=output_dtype(entropy))
    for rows in row_sets(entropy, mask, outcome, group_ids, config, length_penalty):
        _, reward, mean, std, _ = _credit(rows, config)
        advantage = (reward - mean) / (std + STD_EPS)
        paid = rows.mask
        if not config.shape_uniform_groups:
            paid = paid & ~rows.uniform(rows.has_tokens)
        advantages[rows.index] = advantage.where(paid, 0).to(advantages.dtype)
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
    """Compute the shares, rewards and statistics that :func:`gtpo_advantages` combines, for tools that display them.

    Same arguments and errors.

    Returns:
        share and reward, (B, T), 0 where the mask is False; mean and std, (B,); all float64.
    """
    share, reward = torch.zeros(2, *mask.shape, dtype=torch.float64, device=mask.device)
    mean, std = torch.zeros(2, len(mask), dtype=torch.float64, device=mask.device)
    for rows in row_sets(entropy, mask, outcome, group_ids, config, length_penalty):
        share[rows.index], reward[rows.index], row_mean, row_std, _ = _credit(rows, config)
        mean[rows.index], std[rows.index] = row_mean[:, 0], row_std[:, 0]
    return CreditParts(share, reward, mean, std)
