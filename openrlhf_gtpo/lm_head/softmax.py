"""The arithmetic of a row of logits: the statistics that one pass keeps, and the gradient in closed form.

Owns the online ("flash") softmax: partial statistics of some columns, their merging, log-probability and entropy at
the end, and a logit's gradient. Knows nothing about products, tiles or process groups.

Exponentials are powers of two: with c = log2(e) / temperature and z_j = (x_j - max_k x_k) * c <= 0,

    S = sum_j 2**z_j            D = sum_j 2**z_j * z_j
    log p_l = (x_l - max x) / temperature - ln S
    entropy = ln 2 * (log2 S - D / S)

Both terms of the entropy are >= 0 (S >= 1 because the largest column contributes 1, and D <= 0), so nothing cancels,
however peaked the row is. The base is 2 because temperature and the change of base are one factor, and because
`torch.exp` on CPU calls MKL: it took 0.58 ns per logit against 0.13 ns for `torch.exp2`, and 7 to 18 ns against 0.13
to 0.52 ns where the result underflows, as it does for most columns of a peaked row (measured with torch 2.13, one
AVX-512 core; GELU had the same problem: https://github.com/pytorch/pytorch/issues/48388).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# 2**-10000 is zero in every dtype used here, and 0 * -10000 is 0, where 0 * -inf would be NaN.
LOWEST_EXPONENT = -1e4


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass
class TokenStatistics:
    """Statistics of T tokens over some of the columns. All (T,), in the accumulation dtype.

    `maximum` and `label_logit` are raw logits (before the temperature); `label_logit` is -inf where the label is not
    among the columns. `weighted_exponents` is D above, or None if the entropy is not needed.
    """

    maximum: Tensor
    sum_exp: Tensor
    weighted_exponents: Tensor | None
    label_logit: Tensor

    @classmethod
    def empty(cls, tokens: int, dtype: torch.dtype, device: torch.device, with_entropy: bool) -> "TokenStatistics":
        """Statistics of no columns. The maximum is finite, so that differences of maxima are never NaN."""

        def filled(value: float) -> Tensor:
            return torch.full((tokens,), value, dtype=dtype, device=device)

        return cls(
            maximum=filled(torch.finfo(dtype).min),
            sum_exp=filled(0.0),
            weighted_exponents=filled(0.0) if with_entropy else None,
            label_logit=filled(-math.inf),
        )

    def rows(self, tokens: slice) -> "TokenStatistics":
        """Statistics of a slice of the tokens, as views."""
        return TokenStatistics(**{name: _slice(part, tokens) for name, part in vars(self).items()})

    def rebase_(self, maximum: Tensor, bits_per_logit: float) -> None:
        """Express the sums relative to `maximum` (T,), which must be at least the current one."""
        shift = (self.maximum - maximum).mul_(bits_per_logit).clamp_(min=LOWEST_EXPONENT)
        factor = torch.exp2(shift)
        if self.weighted_exponents is not None:
            self.weighted_exponents.add_(shift.mul_(self.sum_exp)).mul_(factor)
        self.sum_exp.mul_(factor)
        self.maximum.copy_(maximum)

    def merge_(self, other: "TokenStatistics", bits_per_logit: float) -> None:
        """Merge in the columns of `other`."""
        maximum = torch.maximum(self.maximum, other.maximum)
        self.rebase_(maximum, bits_per_logit)
        other.rebase_(maximum, bits_per_logit)
        self.sum_exp.add_(other.sum_exp)
        if self.weighted_exponents is not None and other.weighted_exponents is not None:
            self.weighted_exponents.add_(other.weighted_exponents)
        torch.maximum(self.label_logit, other.label_logit, out=self.label_logit)

    def log_prob(self, temperature: float) -> Tensor:
        """(T,) log-probability of the label in nats, <= 0."""
        return ((self.label_logit - self.maximum) / temperature - torch.log(self.sum_exp)).clamp_(max=0.0)

    def entropy(self, vocab_size: int) -> Tensor:
        """(T,) entropy in nats, in [0, ln vocab_size]."""
        assert self.weighted_exponents is not None
        bits = torch.log2(self.sum_exp) - self.weighted_exponents / self.sum_exp
        return bits.mul_(math.log(2)).clamp_(min=0.0, max=math.log(vocab_size))

    def normalizer(self, bits_per_logit: float) -> Tensor:
        """(T,) the raw logit at which a column would have probability 1: p_j = 2**((x_j - normalizer) * c)."""
        return self.maximum + torch.log2(self.sum_exp) / bits_per_logit

    def packed(self) -> Tensor:
        """All statistics as one tensor to send, (3 or 4, T); `unpacked` is the inverse."""
        parts = [self.maximum, self.sum_exp, self.label_logit]
        return torch.stack(parts if self.weighted_exponents is None else [*parts, self.weighted_exponents])

    @classmethod
    def unpacked(cls, packed: Tensor) -> "TokenStatistics":
        maximum, sum_exp, label_logit, *rest = packed.unbind()
        return cls(maximum, sum_exp, rest[0] if rest else None, label_logit)


@dataclass
class LogitGradient:
    """d loss / d logits of T tokens. All (T,) in the accumulation dtype.

    With c = log2(e) / temperature, z = (x - normalizer) * c, p = 2**z, gradients g of the log-probability and e of the
    entropy H:

        d x_j = g / temperature * [j = label] - p_j * (a + b * z_j)
        a = (g + e * H) / temperature,   b = e * ln 2 / temperature

    because d H / d x_j = -p_j * (ln p_j + H) / temperature. `label_grad` is g / temperature, `level` is a, and
    `slope` is b, or None without a gradient of the entropy.
    """

    normalizer: Tensor
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
        normalizer: Tensor,
        temperature: float,
    ) -> "LogitGradient":
        """Make the logits' gradient from the gradients of the two outputs, where None means zero."""
        label_grad = torch.zeros_like(normalizer) if grad_log_prob is None else grad_log_prob.to(normalizer.dtype)
        label_grad = label_grad / temperature
        level, slope = label_grad, None
        if grad_entropy is not None:
            assert entropy is not None
            grad_entropy = grad_entropy.to(normalizer.dtype) / temperature
            level, slope = label_grad + grad_entropy * entropy, grad_entropy * math.log(2)
        return cls(normalizer, label_grad, level, slope, bits_per_logit=1 / (math.log(2) * temperature))

    def rows(self, tokens: slice) -> "LogitGradient":
        """The gradient of some of the tokens."""
        return LogitGradient(**{name: _slice(part, tokens) for name, part in vars(self).items()})


def _slice(part: Any, tokens: slice) -> Any:
    return part[tokens] if isinstance(part, Tensor) else part
