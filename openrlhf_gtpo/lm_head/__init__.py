"""The LM head: hidden states to per-token log-probability and entropy, without ever holding the logits.

| file | owns |
|---|---|
| `function` | the public function, its checks, its autograd |
| `projection` | the two passes over a shard and the plan of the backward pass |
| `portable` | one tile of either pass, in torch |
| `statistics` | the online softmax arithmetic |
| `shard` | which columns a rank has, and every collective |
| `tiles` | how large a tile may be |

This room knows torch alone.
"""

from .function import linear_log_prob_and_entropy

__all__ = ["linear_log_prob_and_entropy"]
