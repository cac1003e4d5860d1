"""Each token's importance ratio, and whether the policy loss clipped it, for rollout dumps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from openrlhf.models.loss import PolicyLoss
from torch import Tensor

from openrlhf_gtpo.algorithms.losses import MAX_LOG_RATIO, clipped_objective
from openrlhf_gtpo.integration.credit.loss import CreditLoss


class TokenRatios:
    """Keeps what ``loss`` sees of the rows that go into a dump until :meth:`take` is called.

    Attributes:
        rows: for the micro-batch that ``loss`` gets next, set before that: each row's place in the step's batch, None
            if no dump has it. ``RolloutDumper`` puts them in the experiences' ``labels``, which only rewards need.
    """

    def __init__(self, loss: PolicyLoss) -> None:
        self.rows: Sequence[int | None] = ()
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        loss.register_forward_hook(self._see, with_kwargs=True)

    def take(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return what was seen since the last call, by row, from the last epoch: (T,) ratios pi / pi_old, 1 outside
        the action mask, and (T,) bool, True where the clip decided; at sequence level it decides for whole rows."""
        seen, self._seen = self._seen, {}
        return {row: (ratio.cpu().numpy(), clipped.cpu().numpy()) for row, (ratio, clipped) in seen.items()}

    def _see(self, loss: PolicyLoss, inputs: tuple[Tensor, ...], options: dict[str, Any], _: Any) -> None:
        if all(row is None for row in self.rows):
            return
        log_probs, old_log_probs, advantages = (values.detach().float() for values in inputs)
        mask = options["action_mask"].bool()
        log_ratio = (log_probs - old_log_probs).where(mask, 0)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if isinstance(loss, CreditLoss):
            clipped = loss.clipped
        else:  # upstream's reports only how many
            decides = ratio
            if loss.policy_loss_type == "gspo":
                if loss.is_correction_level != "off":
                    log_ratio = (log_probs - options["rollout_log_probs"]).where(mask, 0)
                decides = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)).exp()
            _, clipped = clipped_objective(decides, advantages, loss.clip_eps_low, loss.clip_eps_high, None)
        if clipped.dim() == 1:
            clipped = clipped.unsqueeze(-1)
        for i, row in enumerate(self.rows):
            if row is not None:
                self._seen[row] = ratio[i], (clipped & mask)[i]
