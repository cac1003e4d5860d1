"""The sequence-level policy loss inside OpenRLHF's, so that its dual clip, correction and normalisers stay in force."""

from typing import Any

import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.models.utils import masked_mean

from openrlhf_gtpo.algorithms import sequence_ratio
from openrlhf_gtpo.algorithms.config import Mean
from openrlhf_gtpo.integration.errors import TrainingStopped


class SequencePolicyLoss(PolicyLoss):
    """GRPO-S (Eq. 6, 7, 18): one ratio per response, -min(w A, clip(w) A) per row, mean over the rows of the step.

    Upstream's token loss is handed log-probs whose ratio is the response's ŵ at every token. With its per-row mean that
    is the sequence loss, and everything else upstream does with a loss applies unchanged.
    """

    def __init__(self, *, ratio_mean: Mean, **options: Any) -> None:
        super().__init__(token_level_loss=False, policy_loss_type="ppo", **options)
        self.ratio_mean = ratio_mean

    def forward(  # type: ignore[override]
        self, log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, **rest: Any
    ) -> tuple:
        """As upstream's: (B, T) log-probs and advantages, ``action_mask`` (B, T) by name.

        Returns:
            loss, clip ratio, approximate KL of the tokens, and upstream's two correction metrics.
        """
        mask = rest["action_mask"].bool()
        log_ratio = sequence_ratio(log_probs, old_log_probs, mask, self.ratio_mean).log()  # (B,)
        loss, clip_ratio, _, *correction = super().forward(
            old_log_probs + log_ratio.unsqueeze(-1), old_log_probs, advantages, **rest
        )
        return loss, clip_ratio, masked_mean(old_log_probs - log_probs.detach(), mask), *correction


class FinitePolicyLoss(torch.nn.Module):
    """Stops the step on a loss that is not finite, before its backward pass: no weight changes after it."""

    def __init__(self, loss: PolicyLoss) -> None:
        super().__init__()
        self.loss = loss

    def forward(
        self, log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, **rest: Any
    ) -> tuple:
        """As the wrapped loss; raises TrainingStopped with the micro-batch's first bad row."""
        result = self.loss(log_probs, old_log_probs, advantages, **rest)
        if not torch.isfinite(result[0]):
            rows = (~torch.isfinite(log_probs.detach()).all(dim=-1)).nonzero().flatten().tolist()
            reason = "its log-probs are finite, but the loss overflows"
            if rows:
                reason = f"row {rows[0]} of the micro-batch has log-probs that are not finite"
            raise TrainingStopped(f"The policy loss is {result[0].item()}: {reason}. No weights were changed by it.")
        return result
