"""The operations on one tile of logits in plain torch, on any device: the default on CPU, the reference everywhere.

The passes run in place on tiles that stay in cache (see `tiles`). Existing logits must not be modified, so a compiled
pass reads them instead.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .softmax import LOWEST_EXPONENT, LogitGradient, TokenStatistics, accumulation_dtype
from .tiles import Tile, portable_bytes_per_logit

_LOWEST_LOGIT = -1e30  # replaces -inf, so that results stay finite


class PortableTile:
    """A `TileWork` that holds the product, its widened copy, and a second one where 2**z and z are needed together."""

    def __init__(self, tile: Tile, like: Tensor, second: bool) -> None:
        wide = accumulation_dtype(like.dtype)
        size = tile.tokens * tile.columns
        self._wide = torch.empty(size, dtype=wide, device=like.device)
        self._second = torch.empty(size, dtype=wide, device=like.device) if second else None
        self._narrow = self._wide if like.dtype == wide else torch.empty(size, dtype=like.dtype, device=like.device)

    @staticmethod
    def bytes_per_logit(item: int, wide: int, second: bool) -> int:
        return portable_bytes_per_logit(item, wide, second)

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        shape = (hidden.size(0), weight.size(0))
        return torch.mm(hidden, weight.t(), out=_part(self._narrow, shape))

    @classmethod
    def statistics(cls, logits: Tensor, labels: Tensor, bits_per_logit: float) -> TokenStatistics:
        from torch._dynamo.decorators import mark_unbacked

        mark_unbacked(logits, 0)  # otherwise a batch of one row would recompile it
        label_logit = logits.gather(1, labels.unsqueeze(1)).squeeze(1).to(accumulation_dtype(logits.dtype))
        return TokenStatistics(*_compiled_whole_rows()(logits, bits_per_logit), label_logit)

    def absorb(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, total: TokenStatistics, bits_per_logit: float
    ) -> None:
        x = self._logits(product, bias)
        column, in_tile = _columns_of_labels(labels, x.size(1))
        torch.where(in_tile, x.gather(1, column).squeeze(1), total.label_logit, out=total.label_logit)
        total.rebase_(torch.maximum(total.maximum, x.amax(1)), bits_per_logit)
        z = _exponents_(x, total.maximum, bits_per_logit, may_be_infinite=bias is not None)
        p = torch.exp2(z, out=self._beside(z))
        total.sum_exp.add_(p.sum(1))
        if total.weighted_exponents is not None:
            total.weighted_exponents.add_(p.mul_(z).sum(1))

    def gradient(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, logit_grad: LogitGradient, bias_sum: Tensor | None
    ) -> Tensor:
        z = self._logits(product, bias)
        _exponents_(z, logit_grad.normalizer, logit_grad.bits_per_logit, may_be_infinite=logit_grad.slope is not None)
        p = torch.exp2(z, out=self._beside(z))
        if logit_grad.slope is None:
            grad = p.mul_(-logit_grad.level.unsqueeze(1))
        else:
            grad = p.mul_(z.mul_(-logit_grad.slope.unsqueeze(1)).sub_(logit_grad.level.unsqueeze(1)))
        column, in_tile = _columns_of_labels(labels, grad.size(1))
        grad.scatter_add_(1, column, (logit_grad.label_grad * in_tile).unsqueeze(1))
        if bias_sum is not None:
            bias_sum.add_(grad.sum(0))
        return grad if self._narrow is self._wide else product.copy_(grad)

    def _logits(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """(t, v) raw logits in the accumulation dtype."""
        logits = product if self._narrow is self._wide else _part(self._wide, product.shape).copy_(product)
        return logits if bias is None else logits.add_(bias)

    def _beside(self, like: Tensor) -> Tensor:
        """Wide scratch memory of the shape of `like` (t, v), or `like` itself, to work in place, if there is none."""
        return like if self._second is None else _part(self._second, like.shape)


@cache
def _compiled_whole_rows() -> Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]:
    """`_whole_rows` as two loops over the logits, without copying them. Lazy: torch.compile takes 2 s to import."""
    return torch.compile(_whole_rows, dynamic=True)


def _whole_rows(logits: Tensor, bits_per_logit: float) -> tuple[Tensor, Tensor, Tensor]:
    """(T,) each: maximum, sum of exponentials and weighted exponents of logits (T, V)."""
    x = logits.to(accumulation_dtype(logits.dtype)).clamp(min=_LOWEST_LOGIT)
    maximum = x.amax(1)
    z = (x - maximum.unsqueeze(1)) * bits_per_logit
    p = torch.exp2(z)
    # Compiled loops add one number at a time. In float32 the error is 1e-5 at 150,000 columns.
    sum_exp = p.sum(1, dtype=torch.float64)
    weighted_exponents = (p * z).sum(1, dtype=torch.float64)
    return maximum, sum_exp.to(x.dtype), weighted_exponents.to(x.dtype)


def _part(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    return memory[: shape[0] * shape[1]].view(shape)


def _exponents_(logits: Tensor, zero: Tensor, bits_per_logit: float, may_be_infinite: bool) -> Tensor:
    """Turn logits (t, v) into exponents of two in place: (logits - zero) * c; `zero` is (t,)."""
    logits.sub_(zero.unsqueeze(1)).mul_(bits_per_logit)
    return logits.clamp_(min=LOWEST_EXPONENT) if may_be_infinite else logits


def _columns_of_labels(labels: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """(t, 1) the label's column within the tile, clamped to it, and (t,) whether the label is in the tile at all."""
    in_tile = (labels >= 0) & (labels < columns)
    return labels.clamp(0, columns - 1).unsqueeze(1), in_tile
