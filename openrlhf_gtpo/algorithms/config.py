"""The settings of GTPO and GRPO-S, refused on construction when they contradict the paper.

Owns field names, defaults and their rules. Knows no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

GTPOVariant = Literal["v1", "v1_clipped", "v2", "v3"]
GRPOSVariant = Literal["v1", "v2", "v3"]
Compare = Literal["position", "response", "group"]
Mean = Literal["arithmetic", "geometric"]
NormaliseOver = Literal["zero_filled", "polarity"]
Scope = Literal["group", "batch"]

SUM_TO_ONE_VARIANTS = ("v1_clipped", "v2")  # Eq. 11 wants alpha1 + alpha2 = 1


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not a known option; use one of {allowed}.")


def check_number(
    name: str,
    value: object,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
) -> None:
    """Raise ValueError unless ``value`` is a finite real number within the bounds."""
    rules = []
    if above is not None:
        rules.append(f"> {above:g}")
    if at_least is not None:
        rules.append(f">= {at_least:g}")
    if at_most is not None:
        rules.append(f"<= {at_most:g}")
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (above is None or value > above)
        and (at_least is None or value >= at_least)
        and (at_most is None or value <= at_most)
    )
    if not good:
        raise ValueError(f"{name}={value!r} is out of range; use a finite number {' and '.join(rules)}".rstrip() + ".")


def check_flag(name: str, value: object) -> None:
    """Raise ValueError unless ``value`` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} is not a switch; use True or False.")


@dataclass(frozen=True)
class GTPOConfig:
    """Group Token Policy Optimization: one reward per action token.

    ``alpha1`` and ``alpha2`` default by variant: 1 and 0.1 for ``v3`` (rev. Eq. 3, 5), 0.9 and 0.1 for
    ``v1_clipped`` and ``v2``, where Eq. 11 wants them to sum to 1 (giving one of them there sets the other).

    Fields:
        variant: ``v1`` (Eq. 2), ``v1_clipped`` (Eq. 11, 12), ``v2`` (Eq. 13) or ``v3`` (rev. Eq. 3, 5).
        alpha: weight of the entropy share in ``v1``.
        alpha1, alpha2: weights of outcome and entropy share in the other variants.
        kappa: ``v1_clipped`` and ``v2`` clip the token reward to [1, alpha1 + alpha1 / kappa]; > 1.
        success_threshold: rows with outcome >= this form O+, the others O-.
        compare: what a token's entropy is compared with: the tokens at the same ``position`` of the other
            responses, the same ``response``, or the whole ``group``.
        entropy_mean: the mean in the share's denominator.
        normalise_over: for the two-set variants ``v2`` and ``v3``: over all tokens with the other polarity as
            zeros (``zero_filled``) or over the rows of one ``polarity`` alone. No effect on ``v1``, ``v1_clipped``.
        scope: rows over which mean and std are taken: the ``group`` or the ``batch``.
        shape_uniform_groups: keep advantages of groups whose rows all succeed or all fail (else they are 0).
        entropy_eps: entropies are clamped from below at this many nats before anything is computed from them.

    Raises:
        ValueError: a setting out of range, or alpha1 + alpha2 != 1, or alpha1 + alpha1 / kappa < 1 where it matters.
    """

    variant: GTPOVariant = "v3"
    alpha: float = 0.1
    alpha1: float = None  # type: ignore[assignment]  # a float after construction; the default depends on variant
    alpha2: float = None  # type: ignore[assignment]
    kappa: float = 2.0
    success_threshold: float = 1.0
    compare: Compare = "position"
    entropy_mean: Mean = "arithmetic"
    normalise_over: NormaliseOver = "zero_filled"
    scope: Scope = "group"
    shape_uniform_groups: bool = False
    entropy_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, get_args(GTPOVariant))
        self._fill_alphas()
        check_number("alpha", self.alpha, at_least=0)
        check_number("kappa", self.kappa, above=1)
        _check_common(self)
        check_choice("compare", self.compare, get_args(Compare))
        if self.variant in SUM_TO_ONE_VARIANTS:
            self._check_clip()

    @property
    def two_sets(self) -> bool:
        """Whether O+ and O- are normalised as two sets (Eq. 14, 15) instead of one (Eq. 3)."""
        return self.variant in ("v2", "v3")

    def _fill_alphas(self) -> None:
        """None becomes the variant's default, or what is left of 1 where the two must sum to 1."""
        sum_to_one = self.variant in SUM_TO_ONE_VARIANTS
        given = {name: getattr(self, name) for name in ("alpha1", "alpha2") if getattr(self, name) is not None}
        for name, value in given.items():
            check_number(name, value, at_least=0, at_most=1 if sum_to_one else None)
        filled = {"alpha1": 0.9 if sum_to_one else 1.0, "alpha2": 0.1, **given}
        if sum_to_one and len(given) == 1:
            missing = "alpha2" if "alpha1" in given else "alpha1"
            filled[missing] = 1 - sum(given.values())
        for name, value in filled.items():
            object.__setattr__(self, name, value)

    def _check_clip(self) -> None:
        total = self.alpha1 + self.alpha2
        if not math.isclose(total, 1, abs_tol=1e-9):
            raise ValueError(
                f"alpha1={self.alpha1:g}, alpha2={self.alpha2:g} sum to {total:g}, but variant={self.variant!r} needs "
                "alpha1 + alpha2 = 1 (Eq. 11); give only one of them and the other follows."
            )
        upper = self.alpha1 + self.alpha1 / self.kappa
        if upper < 1 - 1e-9:
            raise ValueError(
                f"alpha1={self.alpha1:g}, kappa={self.kappa:g} give alpha1 + alpha1/kappa = {upper:g} < 1, but "
                f"variant={self.variant!r} clips to [1, alpha1 + alpha1/kappa] (Eq. 11) and so needs "
                "alpha1 + alpha1/kappa >= 1; raise alpha1 or lower kappa."
            )


@dataclass(frozen=True)
class GRPOSConfig:
    """Sequence-level GRPO (GRPO-S): one reward per response.

    Fields:
        variant: ``v1`` (Eq. 5; GRPO itself when ``beta`` is 0), ``v2`` (Eq. 17) or ``v3`` (rev. Eq. 9).
        beta: weight of the entropy share on O+ in ``v1`` and ``v2``.
        beta1, beta2: weights of outcome and entropy share in ``v3``.
        entropy_mean: the mean over a response's tokens that makes its entropy.
        ratio_mean: the mean over a response's tokens that makes its importance ratio (geometric is GSPO's);
            hand it to ``policy_loss``.
        success_threshold, normalise_over, scope, shape_uniform_groups, entropy_eps: as in :class:`GTPOConfig`.

    Raises:
        ValueError: a setting out of range.
    """

    variant: GRPOSVariant = "v3"
    beta: float = 0.1
    beta1: float = 1.0
    beta2: float = 0.1
    success_threshold: float = 1.0
    entropy_mean: Mean = "arithmetic"
    ratio_mean: Mean = "arithmetic"
    normalise_over: NormaliseOver = "zero_filled"
    scope: Scope = "group"
    shape_uniform_groups: bool = False
    entropy_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_choice("variant", self.variant, get_args(GRPOSVariant))
        for name in ("beta", "beta1", "beta2"):
            check_number(name, getattr(self, name), at_least=0)
        _check_common(self)
        check_choice("ratio_mean", self.ratio_mean, get_args(Mean))

    @property
    def two_sets(self) -> bool:
        """Whether O+ and O- are normalised as two sets (Eq. 19) instead of one (Eq. 8)."""
        return self.variant in ("v2", "v3")


def _check_common(config: GTPOConfig | GRPOSConfig) -> None:
    check_number("success_threshold", config.success_threshold)
    check_number("entropy_eps", config.entropy_eps, above=0)
    check_choice("entropy_mean", config.entropy_mean, get_args(Mean))
    check_choice("normalise_over", config.normalise_over, get_args(NormaliseOver))
    check_choice("scope", config.scope, get_args(Scope))
    check_flag("shape_uniform_groups", config.shape_uniform_groups)
