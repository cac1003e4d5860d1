"""A watch for outlier steps (``--train.spike_zscore``), by a z-score from medians, which a spike does not move."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from openrlhf_gtpo.errors import Restartable
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import ControllerFeature

# The only metric watched in a step that other rows have joined, because these are far from the policy.
_OF_OWN_ROWS = ("ppo_kl",)
_WATCHED = ("policy_loss", "kl", "ppo_kl", "actor_grad_norm")
_WINDOW, _ENOUGH = 50, 20  # steps to compare with, and their minimum
_RECENT = "recent_metrics"  # in a checkpoint


class Spikes(ControllerFeature):
    """Attributes:
    recent: the last steps' losses, KLs and gradient norms, by name.
    """

    def __init__(self, args: Arguments) -> None:
        super().__init__(args)
        self.recent: dict[str, list[float]] = {}

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """Record a step's metrics; raise Restartable if one of them is a spike."""
        limit = self.args.train.spike_zscore
        for name in _OF_OWN_ROWS if metrics.get(names.RESCUE_ROWS) else _WATCHED:
            value, before = metrics.get(name), self.recent.setdefault(name, [])
            if not isinstance(value, float) or not math.isfinite(value):
                continue
            middle = median(before or [value])
            spread = 1.4826 * median([abs(other - middle) for other in before] or [0.0])  # if normal, their deviation
            if len(before) >= _ENOUGH and value - middle > limit * spread > 0:
                raise Restartable(
                    f"{name} of step {step} is {value:.4g}, {(value - middle) / spread:.1f} robust standard deviations"
                    f" above the median {middle:.4g} of the {len(before)} steps before it (--train.spike_zscore "
                    f"{limit:g}). The step is not saved."
                )
            before.append(value)
            del before[:-_WINDOW]

    def state(self) -> dict[str, Any]:
        return {_RECENT: self.recent}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.recent = state.get(_RECENT, {})
