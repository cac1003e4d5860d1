"""Lengths of the responses in a benchmark's batches. Knows torch alone."""

import torch
from torch import Tensor

# Of log-lengths. The longest of some hundred responses is then about ten times the median, as in runs of reasoning
# models.
_TAIL = 0.9


def uniform_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, all from half of ``longest`` to ``longest`` alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(longest // 2, longest + 1, (rows,), generator=generator)


def long_tailed_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, log-normal with median ``longest / 6`` and cut off at ``longest``, as by a token limit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = longest / 6 * (_TAIL * torch.randn(rows, generator=generator)).exp()
    return lengths.round().clamp(1, longest).long()
