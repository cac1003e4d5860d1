"""The LM head: per-token log-probability and entropy from hidden states, without holding all logits, or from existing
logits.

| file | owns |
|---|---|
| `function` | the public functions, their checks, the choice of `portable` or `kernels`, its autograd |
| `projection` | the forward and the backward pass over a shard: plan, loops over tiles, products, sums of gradients |
| `portable` | the work on one tile, in torch |
| `kernels` | the same, in Triton |
| `softmax` | the online softmax arithmetic, and the gradient of a logit in closed form |
| `shard` | which columns a rank has, and every collective |
| `tiles` | how large a tile may be |

This package depends on torch, and on Triton where it is installed; `tiles` needs neither and is imported without them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .function import linear_log_prob_and_entropy, log_prob_and_entropy

__all__ = ["linear_log_prob_and_entropy", "log_prob_and_entropy"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import function

    return getattr(function, name)
