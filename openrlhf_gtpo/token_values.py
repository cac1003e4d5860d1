"""What a forward pass, or a sampler, says of tokens, all the way to their advantages. Knows torch alone."""

from typing import NamedTuple

from torch import Tensor


class TokenValues(NamedTuple):
    """Log-probs of the tokens and entropies (nats) of the distributions they come from; (B, T) each, 0 outside the actions."""

    log_probs: Tensor
    entropy: Tensor
