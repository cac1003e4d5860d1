"""The pair of rewards that shaping gives back.

Owns the type that GTPO and GRPO-S share. Knows neither.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ShapedRewards(NamedTuple):
    """Rewards before normalisation: (B, T) for GTPO, (B,) for GRPO-S.

    Two-set variants: ``positive`` is r+ (0 on rows of O-) and ``negative`` is r- (0 on rows of O+).
    One-set variants (``v1``, ``v1_clipped``): ``positive`` is the reward of every row, ``negative`` is 0.
    """

    positive: Tensor
    negative: Tensor
