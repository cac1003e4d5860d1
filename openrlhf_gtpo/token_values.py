"""What a forward pass is asked about tokens, and what it, or a sampler, says of them all the way to their advantages.

Knows torch alone.
"""

from typing import NamedTuple

from torch import Tensor

# A row: token ids (n,), and which of them are actions (n,) bool; never the first, which nothing predicts.
TokenRow = tuple[Tensor, Tensor]
MicroBatch = list[TokenRow]


class TokenValues(NamedTuple):
    """Log-probs of tokens and entropies (nats) of the distributions they come from: (B, T) each, 0 outside actions."""

    log_probs: Tensor
    entropy: Tensor


def place(values: Tensor, action_mask: Tensor) -> Tensor:
    """(N,) values of actions, row by row, where ``action_mask`` (B, A) bool is True, 0 elsewhere; differentiable."""
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)
