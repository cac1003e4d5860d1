"""Context parallelism: which tokens of a packed row are a rank's, and results of all ranks put together.

Every sequence is cut into 2 × CP chunks; rank r has the r-th and the r-th from the end, so that causal attention
costs every rank the same. It is the split of Megatron's rotary embedding and of Transformer Engine's attention.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor


def chunks_of_rank(lengths: Tensor, size: int, rank: int) -> Tensor:
    """(P / size,) places of ``rank``'s tokens in a row of sequences of ``lengths``, sequence after sequence.

    Lengths are multiples of 2 × ``size``.
    """
    places, start = [], 0
    for length in lengths.tolist():
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            places.append(torch.arange(start + index * chunk, start + (index + 1) * chunk, device=lengths.device))
        start += length
    return torch.cat(places)


def gather_actions(values: Tensor, mine: Tensor) -> Tensor:
    """(M,) values of this rank's actions to (N,) values of all, on every context-parallel rank; differentiable.

    Every rank then computes the same loss of them, and only its own values carry its gradient.
    """
    return _Sum.apply(values.new_zeros(mine.shape).masked_scatter(mine, values))


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_context_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
