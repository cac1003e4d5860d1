"""GTPO's and GRPO-S's loss where OpenRLHF's trainers expect their own: the surrogate of ``algorithms``, weighted by
OpenRLHF's train-rollout correction and divided by the counts of the whole optimizer step.
"""

import math
from types import SimpleNamespace
from typing import Any

from openrlhf.models.loss import PolicyLoss
from torch import Tensor

from openrlhf_gtpo.algorithms import policy_surrogate
from openrlhf_gtpo.algorithms.config import Mean
from openrlhf_gtpo.algorithms.losses import Level
from openrlhf_gtpo.errors import TrainingStopped


def loss_options(args: SimpleNamespace) -> dict[str, Any]:
    """OpenRLHF's options of :class:`CreditLoss` in a run's arguments."""
    correction = {name: v for name, v in vars(args.algo.advantage).items() if name.startswith("is_correction_")}
    low, high = args.actor.eps_clip_low_high
    return {"clip_eps_low": low, "clip_eps_high": high, "dual_clip": args.actor.dual_clip, **correction}


class CreditLoss(PolicyLoss):
    """The loss of ``level`` (Eq. 4, 16 for tokens; Eq. 6, 7, 18 for sequences).

    Args:
        level: ``token`` or ``sequence``.
        ratio_mean: how a response's ratio is made of its tokens', at sequence level.
        options: OpenRLHF's ``clip_eps_low``, ``clip_eps_high``, ``dual_clip`` and ``is_correction_*``, checked by it.
    """

    def __init__(self, level: Level, ratio_mean: Mean = "arithmetic", **options: Any) -> None:
        super().__init__(token_level_loss=level == "token", **options)
        self.level, self.ratio_mean = level, ratio_mean

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
        """This micro-batch's part of the loss of an optimizer step; NaN where a log-prob is not finite.

        Args:
            log_probs, old_log_probs, advantages, action_mask, rollout_log_probs: (B, T).
            dp_size: replicas whose gradients are averaged rather than added up.
            batch_num_tokens, global_batch_size: action tokens, and rows that have any, of the whole step over all
                replicas; of this micro-batch where they are None.

        Returns:
            the loss; what was clipped, and what the correction filtered: means over tokens, or (B,) for each row where
            they are decided by the row; mean of -(log_probs - old_log_probs), and of the rollout's log-prob minus the
            old one, over tokens. The correction's two are None without it.

        Raises:
            TrainingStopped: an old log-prob or advantage that is not finite, before any backward pass.
        """
        mask = action_mask.bool()
        finite = log_probs.isfinite() | ~mask
        try:
            surrogate = policy_surrogate(
                log_probs.where(finite, old_log_probs),
                old_log_probs,
                advantages,
                mask,
                level=self.level,
                clip_low=self.clip_eps_low,
                clip_high=self.clip_eps_high,
                ratio_mean=self.ratio_mean,
                dual_clip=self.dual_clip,
            )
        except ValueError as error:
            raise TrainingStopped(
                f"The policy loss of a micro-batch: {error} No weights were changed by it."
            ) from error
        loss = surrogate.loss.where(finite.all(), math.nan)
        clipped, rollout_kl, filtered = surrogate.clipped.float(), None, None
        if self.is_correction_level != "off":
            assert rollout_log_probs is not None, "the rollout returned no log-probs to correct with"
            weight, filtered = self._correction(old_log_probs, rollout_log_probs, mask)
            loss = loss * (weight if self.level == "token" else _token_mean(weight, mask, dim=-1))
            rollout_kl = _token_mean(rollout_log_probs - old_log_probs, mask)
        if self.level == "token":
            clipped = _token_mean(clipped, mask)
        units = batch_num_tokens if self.level == "token" else global_batch_size
        if units is None:
            units = surrogate.unit_mask.sum()
        return loss.sum() / units * dp_size, clipped, _token_mean(surrogate.approx_kl, mask), rollout_kl, filtered

    def _correction(self, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Upstream's weights (B, T) of the trainer's policy against the engine's, and what they filter: a token mean,
        or (B,) where whole responses are kept or dropped. Upstream has them in the middle of its own forward alone
        (openrlhf 0.11.2, models/loss.py, PolicyLoss.forward); can go once it has a function for them."""
        low, high = self.is_correction_threshold
        log_ratio = (old_log_probs - rollout_log_probs).where(mask, 0)
        if self.is_correction_gating == "ratio":
            statistic = log_ratio
        else:  # a divergence of the sampled token's probability, which upstream keeps away from 0 and 1
            p, q = (values.exp().clamp(1e-6, 1 - 1e-6) for values in (rollout_log_probs, old_log_probs))
            both = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
            statistic = both if self.is_correction_gating == "binary_kl" else (p - q).abs()
        if self.is_correction_level == "seq":
            statistic = _token_mean(statistic, mask, dim=-1).unsqueeze(-1)
        if self.is_correction_gating == "ratio":
            statistic = statistic.exp()
        kept = (statistic >= low) & (statistic <= high)
        weight = statistic.clamp(low, high) if self.is_correction_mode == "clip" else log_ratio.exp().where(kept, 0)
        dropped = (~kept).float()
        return weight, dropped.squeeze(-1) if self.is_correction_level == "seq" else _token_mean(dropped, mask)


def _token_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of (B, T) over action tokens: of all, or of each row with ``dim`` -1; 0 where there is none."""
    return values.where(mask, 0).sum(dim=dim) / mask.sum(dim=dim).clamp_min(1)
