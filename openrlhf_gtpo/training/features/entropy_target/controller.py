"""In the controller: the entropy bonus's coefficient from step to step, and the end of a collapsed run.

The coefficient follows Skywork-OR1 (arXiv 2505.22312, adaptive entropy control), as TRL does
(https://github.com/huggingface/trl/pull/6140): it rises by delta where the entropy is at most the target, else it
falls; it counts only where the entropy is at most the target. It stays within 0 and 1, so that a long time on one side
does not have to be unlearned. Measured is the mean entropy of the rollout's tokens under the old policy, before the
step that it decides: the actor's, or the sampler's, which costs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature

_MOST = 1.0
_STATE = "entropy_coefficient"  # in a checkpoint


class EntropyControl(ControllerFeature):
    """Attributes:
    coefficient: of the entropy bonus, while the entropy is at most the target.
    entropy: mean over the last rollout's action tokens, in nats; None before the first.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        self.coefficient = args.actor.entropy_coef or 0.0
        self.entropy: float | None = None

    @property
    def _is_low(self) -> bool:
        return self.entropy is not None and self.entropy <= self.args.algo.entropy_target

    def on_batch(self, batch: RolloutBatch, experiences: Sequence[Experience]) -> None:
        """Measure the rollout's entropy, and move the coefficient."""
        assert batch.values is not None
        if not batch.mask.any():
            return
        self.entropy = batch.values.entropy[batch.mask].mean().item()
        delta = self.args.algo.entropy_coef_delta
        self.coefficient = min(max(self.coefficient + (delta if self._is_low else -delta), 0.0), _MOST)

    def loss_weights(self) -> dict[str, float]:
        if not self.args.algo.entropy_target:
            return {}
        return {"entropy_coef": self.coefficient if self._is_low else 0.0}

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        if weights := self.loss_weights():
            metrics[names.ENTROPY_COEFFICIENT] = weights["entropy_coef"]

    def why_to_end(self) -> str | None:
        floor = self.args.algo.entropy_floor
        if self.entropy is None or self.entropy >= floor:
            return None
        return (
            f"The rollout's mean entropy is {self.entropy:.3g} nats per token, below --algo.entropy_floor {floor:g}. "
            "Lower the learning rate or give an --algo.entropy_target; --ckpt.load_tag resumes from an earlier step."
        )

    def state(self) -> dict[str, Any]:
        return {_STATE: self.coefficient}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.coefficient = state.get(_STATE, self.coefficient)
