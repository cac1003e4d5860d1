"""Each token's importance ratio, and whether the policy loss clipped it, for rollout dumps."""

from typing import Any

import numpy as np
from torch import Tensor

from openrlhf_gtpo.training.credit.loss import LossFeature, LossInputs, LossOutputs


class TokenRatios(LossFeature):
    """Ratios and clips of a dump's rows from the loss, until :meth:`take` is called.

    ``RolloutDumper`` puts each row's place in the step's batch into the experiences' ``labels``, which only rewards
    need; None for rows outside the dump.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the values since the last call, by row, from the last epoch: (T,) ratios pi / pi_old, 1 outside the
        action mask; and (T,) bool, True where the clip was active, at sequence level for whole rows."""
        seen, self._seen = self._seen, {}
        return {row: (ratio.cpu().numpy(), clipped.cpu().numpy()) for row, (ratio, clipped) in seen.items()}

    def loss_outputs(self, inputs: LossInputs, outputs: LossOutputs) -> None:
        """Keep ratio and clip of a dump's rows."""
        for row, ratio, clipped in zip(inputs.labels, outputs.ratio, outputs.clipped):
            if row is not None:
                self._seen[row] = ratio, clipped


def take_ratios(actor: Any) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return a training rank's values since the last call; runs in the rank."""
    [ratios] = [feature for feature in actor.trainer.loss_features if isinstance(feature, TokenRatios)]
    return ratios.take()
