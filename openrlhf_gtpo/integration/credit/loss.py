"""The loss of an estimator or surrogate from ``algorithms``, in place of the one that OpenRLHF's trainers expect:
weighted by OpenRLHF's train-rollout correction and divided by the counts of the whole optimizer step.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from openrlhf.models.loss import PolicyLoss
from torch import Tensor

from openrlhf_gtpo.algorithms import SURROGATES, Surrogate, policy_surrogate
from openrlhf_gtpo.algorithms.config import Mean
from openrlhf_gtpo.algorithms.losses import Level
from openrlhf_gtpo.algorithms.surrogates import ClipConfig
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.integration.credit.entropy_credit import entropy_credit

# OpenRLHF's names for the settings of surrogates that it has flags for.
_UPSTREAM_SETTINGS = {"clip_low": "clip_eps_low", "clip_high": "clip_eps_high", "dual_clip": "dual_clip"}


def loss_options(args: SimpleNamespace) -> dict[str, Any]:
    """OpenRLHF's options for :class:`CreditLoss`, from a run's arguments."""
    correction = {name: v for name, v in vars(args.algo.advantage).items() if name.startswith("is_correction_")}
    low, high = args.actor.eps_clip_low_high
    return {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": args.actor.dual_clip, **correction}


def credit_loss(args: SimpleNamespace) -> "CreditLoss | None":
    """The loss of this run's estimator and surrogate, or None if upstream's own does the work.

    Raises:
        UsageError: the surrogate refuses its settings; the message names the flags.
        ValueError: PPO's clip, its dual clip or the train-rollout correction refuses them.
    """
    credit, name, options = entropy_credit(args), args.actor.policy_loss_type, loss_options(args)
    if name in SURROGATES:
        kind = SURROGATES[name]
        fields = [field.name for field in dataclasses.fields(kind.config)]
        settings = {f: options[_UPSTREAM_SETTINGS[f]] for f in fields if f in _UPSTREAM_SETTINGS}
        settings |= {f: getattr(getattr(args.actor, name), f) for f in fields if f not in settings}
        try:
            config = kind.config(**settings)
        except ValueError as error:
            raise UsageError(f"--actor.policy_loss_type {name}, --actor.{name}.*: {error}") from error
        level: Level = "token" if args.actor.loss_agg_mode == "token-mean" else "sequence"
        return CreditLoss(level, surrogate=partial(kind.loss, config=config), reads=kind.reads, **options)
    if credit is None:
        return None
    ClipConfig(options["clip_eps_low"], options["clip_eps_high"])  # what policy_surrogate refuses, after a rollout
    return CreditLoss(credit.estimator.level, getattr(credit.config, "ratio_mean", "arithmetic"), **options)


class CreditLoss(PolicyLoss):
    """The loss at ``level`` (Eq. 4, 16 for tokens; Eq. 6, 7, 18 for sequences), or the mean of another surrogate.

    Args:
        level: ``token`` or ``sequence``; for another surrogate, whether its mean is over all tokens, or over the
            means of the responses.
        ratio_mean: the mean that makes a response's ratio from those of its tokens, at sequence level.
        surrogate: a function of log_probs, old_log_probs, advantages and mask, (B, T) each; None for PPO's clip.
        reads: names in ``given`` that it takes besides, by keyword (see ``SurrogateType``).
        options: OpenRLHF's ``clip_eps_low``, ``clip_eps_high``, ``dual_clip`` and ``is_correction_*``, checked there.

    Attributes:
        clipped: (B, T) or (B,) bool, True where the last micro-batch was clipped.
        given: what trainers know of the next micro-batch; entropies may have columns before those of the actions.
    """

    clipped: Tensor

    def __init__(
        self,
        level: Level,
        ratio_mean: Mean = "arithmetic",
        surrogate: Callable[..., Surrogate] | None = None,
        reads: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(token_level_loss=level == "token", **options)
        self.level, self.ratio_mean, self.surrogate, self.reads = level, ratio_mean, surrogate, reads
        self.given: dict[str, Tensor] = {}

    def forward(  # type: ignore[override]
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        dp_size: int = 1,
        batch_num_tokens: Tensor | None = None,
        global_batch_size: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """This micro-batch's part of the loss of an optimizer step; NaN if a log-prob is not finite.

        Args:
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs: (B, T).
            dp_size: number of replicas whose gradients are averaged rather than summed.
            batch_num_tokens, global_batch_size: number of action tokens, and of rows that have any, in the whole step
                over all replicas; None for this micro-batch's own.

        Returns:
            the loss; what was clipped; the mean over tokens of -(log_probs - old_log_probs); that of the rollout's
            log-prob minus the old one; and what the correction filtered. What was clipped or filtered is a mean over
            tokens, or (B,) where it is decided per row. The last two are None without a correction.

        Raises:
            TrainingStopped: an old log-prob or advantage is not finite; raised before the backward pass.
        """
        mask = action_mask.bool()
        finite = log_probs.isfinite() | ~mask
        unreduced = self.surrogate or partial(
            policy_surrogate,
            level=self.level,
            clip_low=self.clip_eps_low,
            clip_high=self.clip_eps_high,
            ratio_mean=self.ratio_mean,
            dual_clip=self.dual_clip,
        )
        context = {name: self.given[name].to(mask.device, non_blocking=True) for name in self.reads}
        if "entropy" in context:  # NaN where a log-prob is
            context["entropy"] = context["entropy"][:, -mask.shape[1] :].nan_to_num(0.0)
        try:
            surrogate = unreduced(log_probs.where(finite, old_log_probs), old_log_probs, advantages, mask, **context)
        except ValueError as error:
            raise TrainingStopped(
                f"The policy loss of a micro-batch: {error} No weights were changed by it."
            ) from error
        self.clipped = surrogate.clipped
        loss = surrogate.loss.where(finite.all(), math.nan)
        clipped, rollout_kl, filtered = surrogate.clipped.float(), None, None
        if self.is_correction_level != "off":
            assert rollout_log_probs is not None, "the rollout returned no log-probs to correct with"
            weight, filtered = self._correction(old_log_probs, rollout_log_probs, mask)
            loss = loss * (weight if loss.dim() == 2 else self._of_responses(weight, mask))
            rollout_kl = _token_mean(rollout_log_probs - old_log_probs, mask)
        if clipped.dim() == 2:
            clipped = _token_mean(clipped, mask)
        if self.level == "sequence" and loss.dim() == 2:
            loss = _token_mean(loss, mask, dim=-1)
        units = batch_num_tokens if self.level == "token" else global_batch_size
        if units is None:
            units = (mask if self.level == "token" else mask.any(-1)).sum()
        return loss.sum() / units * dp_size, clipped, _token_mean(surrogate.approx_kl, mask), rollout_kl, filtered

    def _of_responses(self, weight: Tensor, mask: Tensor) -> Tensor:
        """The correction of each response, (B,), from those of its tokens, by the same mean as its ratio.
        A geometric mean, which GMPO (the only other surrogate per response) has too, is over the tokens kept."""
        if self.ratio_mean == "arithmetic" and self.surrogate is None:
            return _token_mean(weight, mask, dim=-1)
        kept = mask & (weight > 0)
        return _token_mean(weight.log(), kept, dim=-1).exp() * kept.any(-1)

    def _correction(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Upstream's weights (B, T) of the trainer's policy against the engine's, and what they filter: a token mean,
        or (B,) where whole responses are kept or dropped. Upstream computes them only inside its own forward
        (openrlhf 0.11.2, models/loss.py, PolicyLoss.forward); can go once it has a function for them."""
        low, high = self.is_correction_threshold
        log_ratio = (old_log_probs - rollout_log_probs).where(mask, 0)
        if self.is_correction_gating == "ratio":
            statistic = log_ratio
        else:  # a divergence of the sampled token's probability, which upstream keeps away from 0 and 1
            p, q = (values.exp().clamp(1e-6, 1 - 1e-6) for values in (rollout_log_probs, old_log_probs))
            both = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            # Rounding may make it negative where p and q are closest, and upstream's own loss then drops the token
            # (https://github.com/OpenRLHF/OpenRLHF/pull/1354).
            statistic = both.clamp_min(0) if self.is_correction_gating == "binary_kl" else (p - q).abs()
        if self.is_correction_level == "seq":
            statistic = _token_mean(statistic, mask, dim=-1).unsqueeze(-1)
        if self.is_correction_gating == "ratio":
            statistic = statistic.exp()
        kept = (statistic >= low) & (statistic <= high)
        weight = statistic.clamp(low, high) if self.is_correction_mode == "clip" else log_ratio.exp().where(kept, 0)
        dropped = (~kept).float()
        return weight, dropped.squeeze(-1) if self.is_correction_level == "seq" else _token_mean(dropped, mask)


def _token_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of (B, T) values over all action tokens, or over those of each row with ``dim`` -1; 0 if there are none."""
    return values.where(mask, 0).sum(dim=dim) / mask.sum(dim=dim).clamp_min(1)
