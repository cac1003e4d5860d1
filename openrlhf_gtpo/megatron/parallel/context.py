"""Context parallelism: assigns tokens of a packed row to ranks, and combines the results of all ranks.

Every sequence is cut into 2 × CP chunks; rank r has the r-th and the r-th from the end, so that causal attention costs
the same on every rank. Megatron's rotary embedding and Transformer Engine's attention split sequences in the same way.
"""

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor


def chunks_of_rank(lengths: Tensor, size: int, rank: int) -> Tensor:
    """Return the (P / size,) indices of ``rank``'s tokens in a row of sequences of ``lengths``, sequence by sequence.

    Lengths are multiples of 2 × ``size``.
    """
    places, start = [], 0
    for length in lengths.tolist():
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            places.append(torch.arange(start + index * chunk, start + (index + 1) * chunk, device=lengths.device))
        start += length
    return torch.cat(places)


def gather_actions(values: Tensor, is_local: Tensor) -> Tensor:
    """Gather this rank's (M,) action values into all (N,) values, on every context-parallel rank; differentiable.

    Every rank then computes the same loss from them, and only its own values carry its gradient.
    """
    all_values = values.new_zeros(is_local.shape).masked_scatter(is_local, values)
    # Despite its name, this sums over any group and leaves the gradient as it is.
    return reduce_from_tensor_model_parallel_region(all_values, group=parallel_state.get_context_parallel_group())
