"""The ratio of policy to guide in a guide's rows (``--algo.guide.*``), truncated."""

import math
from dataclasses import replace

import torch

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.credit.loss import LossFeature, LossInputs


class GuideRatios(LossFeature):
    """A loss feature that compares a guide's rows with the guide instead of the old policy, token by token:
    min(exp(log pi_theta - log pi_phi), cap).

    A ratio above ``cap`` keeps its gradient, cap * A * grad log pi_theta: the step is bounded, not skipped. The
    train-rollout correction leaves these rows unchanged, because their ratio is already to the policy that sampled
    them.
    """

    def __init__(self, cap: float) -> None:
        self._log_cap = math.log(cap)

    def loss_inputs(self, inputs: LossInputs) -> LossInputs:
        """Replace old and rollout log-probs by the guide's. Metrics: the fraction of action tokens with a truncated
        ratio, and the drift from the old policy, in which these rows count as 0 (see ``StepMetrics``)."""
        if inputs.off_policy is None:
            return inputs
        assert inputs.old_log_probs is not None and inputs.rollout_log_probs is not None
        rows, mask, log_probs = inputs.off_policy.unsqueeze(-1), inputs.mask, inputs.log_probs.detach()
        behavior = inputs.rollout_log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
        lowest = log_probs - self._log_cap
        guided = torch.fmax(behavior, lowest)  # a NaN from the policy does not replace the guide's value
        tokens = mask.sum().clamp_min(1)
        drift = (inputs.old_log_probs - log_probs).where(mask & ~rows, 0).sum() / tokens
        truncated = ((behavior < lowest) & rows & mask).sum() / tokens
        return replace(
            inputs,
            old_log_probs=torch.where(rows, guided, inputs.old_log_probs),
            rollout_log_probs=torch.where(rows, guided, behavior),
            metrics={**inputs.metrics, names.GUIDE_TRUNCATED: truncated, "ppo_kl": drift},
        )
