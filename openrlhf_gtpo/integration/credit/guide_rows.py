"""Rows of the guiding policy (``--algo.guide.*``), from the experience maker to the loss: those that it sampled, and
all rows of a group that it rescued.

Their ratios are relative to the engine that they came from, which reported the log-probs of what it sampled
(``rollout_log_probs``); their entropies are the old policy's, as for all rows.
"""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from openrlhf_gtpo.report import names

if TYPE_CHECKING:  # see old_policy.py
    from openrlhf.trainer.ppo_utils.experience import Experience


def guide_rows(experience: "Experience") -> Tensor | None:
    """(B,) bool, True where the guide sampled the row or rescued its group; None in a run without a guide."""
    found = [info_rows(experience, name) for name in (names.GUIDE_ROWS, names.RESCUE_ROWS) if name in experience.info]
    return torch.stack(found).bool().any(dim=0) if found else None


def info_rows(experience: "Experience", name: str) -> Tensor:
    """(B,) values of ``info``, tensors that upstream turns into lists on the way to the replay buffer."""
    found = experience.info[name]
    return found if isinstance(found, Tensor) else torch.stack(found)


class GuideRatios:
    """Makes ``loss`` compare guide rows with the guide instead of the old policy, token by token:
    min(exp(log pi_theta - log pi_phi), cap).

    A ratio above ``cap`` keeps its gradient, cap * A * grad log pi_theta: the step is bounded, not skipped. The
    train-rollout correction leaves these rows unchanged, since their ratio is already to the policy that sampled them.

    Attributes:
        rows: (B,) bool for the micro-batch that ``loss`` gets next, set before that; None without a guide.
    """

    def __init__(self, loss: nn.Module, cap: float) -> None:
        self.rows: Tensor | None = None
        self._log_cap = math.log(cap)
        self._metrics: dict[str, Tensor] = {}
        loss.register_forward_pre_hook(self._compare, with_kwargs=True)

    def metrics(self) -> dict[str, Tensor]:
        """Metrics of the last micro-batch: the fraction of its action tokens whose ratio was truncated, and the drift
        from the old policy, in which these rows count as 0 (see ``StepMetrics``)."""
        return {} if self.rows is None else self._metrics

    def _compare(
        self, loss: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], dict[str, Any]] | None:
        if self.rows is None:
            return None
        log_probs, old_log_probs, advantages = inputs
        rows, mask = self.rows.to(log_probs.device, non_blocking=True).unsqueeze(-1), options["action_mask"].bool()
        behavior = options["rollout_log_probs"].to(torch.promote_types(log_probs.dtype, torch.float32))
        lowest = log_probs.detach() - self._log_cap
        tokens = mask.sum().clamp_min(1)
        drift = (old_log_probs - log_probs.detach()).where(mask & ~rows, 0).sum() / tokens
        self._metrics = {names.GUIDE_TRUNCATED: ((behavior < lowest) & rows & mask).sum() / tokens, "ppo_kl": drift}
        guided = torch.fmax(behavior, lowest)  # a NaN from the policy does not replace the guide's value
        given = options | {"rollout_log_probs": torch.where(rows, guided, behavior)}
        return (log_probs, torch.where(rows, guided, old_log_probs), advantages), given
