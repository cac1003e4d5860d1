"""Rows that the guiding policy (``--algo.guide.*``) sampled, from the experience maker to the loss.

Their behavior policy is the guide, whose engine said the log-probs of what it sampled (``rollout_log_probs``); their
entropies are the old policy's, as of all rows.
"""

import math
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor, nn

from openrlhf_gtpo.report import names


def guide_rows(experience: Experience) -> Tensor | None:
    """(B,) bool, True where the guide sampled the row; None in a run without a guide."""
    marks = experience.info.get(names.GUIDE_ROWS)  # upstream makes a list of it on the way to the replay buffer
    if marks is None:
        return None
    return (marks if isinstance(marks, Tensor) else torch.stack(marks)).bool()


class GuideRatios:
    """Has ``loss`` compare guide rows with the guide in the place of the old policy, token by token:
    min(exp(log pi_theta - log pi_phi), cap).

    A ratio above ``cap`` keeps its gradient, cap * A * grad log pi_theta: the step is bounded, not left out. The
    train-rollout correction leaves these rows as they are: their ratio is to what has sampled them already.

    Attributes:
        rows: (B,) bool of the micro-batch that ``loss`` gets next, set before; None where there is no guide.
    """

    def __init__(self, loss: nn.Module, cap: float) -> None:
        self.rows: Tensor | None = None
        self._log_cap = math.log(cap)
        self._truncated = torch.zeros(())
        loss.register_forward_pre_hook(self._compare, with_kwargs=True)

    def metrics(self) -> dict[str, Tensor]:
        """Of the last micro-batch: the part of its action tokens whose ratio was truncated."""
        return {} if self.rows is None else {names.GUIDE_TRUNCATED: self._truncated}

    def _compare(
        self, loss: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        if self.rows is None:
            return None
        log_probs, old_log_probs, advantages = inputs
        rows, mask = self.rows.to(log_probs.device, non_blocking=True).unsqueeze(-1), options["action_mask"].bool()
        behavior = options["rollout_log_probs"].to(torch.promote_types(log_probs.dtype, torch.float32))
        lowest = log_probs.detach() - self._log_cap
        self._truncated = ((behavior < lowest) & rows & mask).sum() / mask.sum().clamp_min(1)
        guided = torch.fmax(behavior, lowest)  # a NaN of the policy's is not the guide's
        given = options | {"rollout_log_probs": torch.where(rows, guided, behavior)}
        return (log_probs, torch.where(rows, guided, old_log_probs), advantages), given
