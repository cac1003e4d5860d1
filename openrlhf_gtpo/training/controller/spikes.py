"""Finds steps whose numbers stand out from those before them, by a z-score from medians, which no spike moves."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from openrlhf_gtpo.errors import Restartable
from openrlhf_gtpo.report import names

_OF_OWN_ROWS = ("ppo_kl",)  # the only one watched with rescued rows, which are far from the policy
_WATCHED = ("policy_loss", "kl", "ppo_kl", "actor_grad_norm")
_WINDOW, _ENOUGH = 50, 20  # steps to look back at, and steps needed before one is judged


@dataclass
class Spikes:
    """The last steps' losses, KLs and gradient norms, ``recent``, by name. A z-score ``limit`` of 0 means no check."""

    limit: float
    recent: dict[str, list[float]] = field(default_factory=dict)

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step's metrics. Raises Restartable if one of them is a spike."""
        watched = _OF_OWN_ROWS if metrics.get(names.RESCUE_ROWS) else _WATCHED
        for name in watched if self.limit else ():
            value, before = metrics.get(name), self.recent.setdefault(name, [])
            if not isinstance(value, float) or not math.isfinite(value):
                continue
            middle = median(before or [value])
            spread = 1.4826 * median([abs(one - middle) for one in before] or [0.0])  # if normal, their deviation
            if len(before) >= _ENOUGH and value - middle > self.limit * spread > 0:
                raise Restartable(
                    f"{name} of step {step} is {value:.4g}, {(value - middle) / spread:.1f} robust standard deviations"
                    f" above the {middle:.4g} of the {len(before)} steps before it (--train.spike_zscore "
                    f"{self.limit:g}). It is not saved."
                )
            before.append(value)
            del before[:-_WINDOW]
