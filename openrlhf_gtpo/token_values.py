"""The tokens of a forward pass, and the values that it, or the sampler, returns for computing advantages.

Depends only on torch.
"""

from typing import NamedTuple

from torch import Tensor

# A row: token ids (n,), and which of them are actions (n,) bool; never the first, which nothing predicts. A mixture of
# experts has a third tensor with the experts that each token goes to: (n, layers, k), uint8 or int16. The dtype's
# largest number stands for no expert: there the router decides.
TokenRow = tuple[Tensor, ...]
MicroBatch = list[TokenRow]


class TokenValues(NamedTuple):
    """Log-probs of tokens, and entropies (nats) of the distributions that they were drawn from: (B, T), 0 outside
    actions, or (N,), only the actions of all rows."""

    log_probs: Tensor
    entropy: Tensor


def place(values: Tensor, action_mask: Tensor) -> Tensor:
    """Put (N,) values of actions, row by row, where ``action_mask`` (B, A) bool is True, else 0; differentiable."""
    return values.new_zeros(action_mask.shape).masked_scatter(action_mask, values)
