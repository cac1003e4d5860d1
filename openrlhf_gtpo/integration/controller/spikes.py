"""Whether a step's numbers stand out of those of the steps before it: a z-score by medians, which no spike moves."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

from openrlhf_gtpo.errors import Restartable
from openrlhf_gtpo.report.metrics import is_number

_WATCHED = ("policy_loss", "kl", "ppo_kl", "actor_grad_norm")
_WINDOW, _ENOUGH = 50, 20  # steps: looked back at, and without which none is judged
_NORMAL = 1.4826  # the standard deviation of normal numbers over their median distance from the median


class Spikes:
    """The last steps' losses, KLs and gradient norms, in ``recent`` by name; a z-score above ``limit`` is a spike, and
    0 looks for none."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.recent: dict[str, list[float]] = {}

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Take in a step's metrics. Raises Restartable where one of them is a spike."""
        for name in _WATCHED if self.limit else ():
            value: Any = metrics.get(name)
            if not is_number(value) or not math.isfinite(value):
                continue
            before = self.recent.setdefault(name, [])
            middle = median(before or [value])
            spread = _NORMAL * median([abs(one - middle) for one in before] or [0.0])
            if len(before) >= _ENOUGH and spread > 0 and value - middle > self.limit * spread:
                raise Restartable(
                    f"{name} of step {step} is {value:.4g}, {(value - middle) / spread:.1f} robust standard deviations"
                    f" above the {middle:.4g} of the {len(before)} steps before it (--train.spike_zscore "
                    f"{self.limit:g}). The step is not saved; the same command with --ckpt.load_enable goes on from "
                    "the last checkpoint."
                )
            before.append(value)
            del before[:-_WINDOW]
