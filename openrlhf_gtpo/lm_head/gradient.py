"""The gradient of the logits in closed form: what a row needs besides the logit itself."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass
class LogitGradient:
    """d loss / d logits of T tokens. All (T,) in the accumulation dtype.

    With c = log2(e) / temperature, z = (x - normaliser) * c, p = 2**z, gradients g of the log-probability and e of the
    entropy H:

        d x_j = g / temperature * [j = label] - p_j * (a + b * z_j)
        a = (g + e * H) / temperature,   b = e * ln 2 / temperature

    because d H / d x_j = -p_j * (ln p_j + H) / temperature. `label_grad` is g / temperature, `level` a, `slope` b, which
    is None without a gradient of the entropy.
    """

    normaliser: Tensor
    label_grad: Tensor
    level: Tensor
    slope: Tensor | None
    bits_per_logit: float

    @classmethod
    def of(
        cls,
        grad_log_prob: Tensor | None,
        grad_entropy: Tensor | None,
        entropy: Tensor | None,
        normaliser: Tensor,
        temperature: float,
    ) -> "LogitGradient":
        """From the gradients of the two outputs; None is zero."""
        label_grad = torch.zeros_like(normaliser) if grad_log_prob is None else grad_log_prob.to(normaliser.dtype)
        label_grad = label_grad / temperature
        level, slope = label_grad, None
        if grad_entropy is not None:
            assert entropy is not None
            grad_entropy = grad_entropy.to(normaliser.dtype) / temperature
            level, slope = label_grad + grad_entropy * entropy, grad_entropy * math.log(2)
        return cls(normaliser, label_grad, level, slope, bits_per_logit=1 / (math.log(2) * temperature))

    def rows(self, tokens: slice) -> "LogitGradient":
        """That of some of the tokens."""
        slope = None if self.slope is None else self.slope[tokens]
        return replace(
            self,
            normaliser=self.normaliser[tokens],
            label_grad=self.label_grad[tokens],
            level=self.level[tokens],
            slope=slope,
        )
