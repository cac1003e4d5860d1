"""The projection in plain torch, on any device: the default on CPU, the reference everywhere.

Owns the two passes over the logits of one vocabulary shard, tile by tile: `token_statistics` (forward) and
`LogitGradient` with `sweep` (backward, which computes every tile of logits again). Knows no autograd and no process
group: columns are the shard's own, and a label outside [0, columns) belongs to another shard.

Products are taken in the dtype of the inputs, everything after them in `accumulation_dtype`. The passes are in place
and over tiles that stay in cache (see `tiles`), in the spirit of Flash Attention (arXiv 2205.14135) and Cut
Cross-Entropy (arXiv 2411.09009).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .statistics import LOWEST_EXPONENT, TokenStatistics
from .tiles import Tile


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32; float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(length: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(length)."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class TileBuffers:
    """The memory of one tile, allocated once and reused: the product, its widened copy, and a second wide buffer."""

    def __init__(self, tile: Tile, like: Tensor, second: bool) -> None:
        wide = accumulation_dtype(like.dtype)
        size = tile.tokens * tile.columns
        self._wide = torch.empty(size, dtype=wide, device=like.device)
        self._second = torch.empty(size, dtype=wide, device=like.device) if second else None
        self._narrow = self._wide if like.dtype == wide else torch.empty(size, dtype=like.dtype, device=like.device)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """(t, v) raw logits in the accumulation dtype, with the bias (already in that dtype)."""
        size, shape = hidden.size(0) * weight.size(0), (hidden.size(0), weight.size(0))
        logits = self._wide[:size].view(shape)
        product = torch.mm(hidden, weight.t(), out=self._narrow[:size].view(shape))
        if self._narrow is not self._wide:
            logits.copy_(product)
        return logits if bias is None else logits.add_(bias)

    def second(self, like: Tensor) -> Tensor:
        """Wide scratch of the shape of `like` (t, v); `like` itself where none was asked for, to work in place."""
        return like if self._second is None else self._second[: like.numel()].view(like.shape)

    def narrow(self, tile: Tensor) -> Tensor:
        """`tile` in the dtype of the inputs, over the product that `logits` no longer needs."""
        if self._narrow is self._wide:
            return tile
        return self._narrow[: tile.numel()].view(tile.shape).copy_(tile)


def exponents_(logits: Tensor, zero: Tensor, bits_per_logit: float, may_be_infinite: bool) -> Tensor:
    """(t, v) in place: (logits - zero) * c, the powers of two that are to be taken; `zero` is (t,)."""
    logits.sub_(zero.unsqueeze(1)).mul_(bits_per_logit)
    return logits.clamp_(min=LOWEST_EXPONENT) if may_be_infinite else logits


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    bits_per_logit: float,
    tile: Tile,
    with_entropy: bool,
) -> TokenStatistics:
    """Statistics of `hidden` (T, H) over the columns of `weight` (V, H); `bias` (V,), `labels` (T,) of this shard."""
    wide = accumulation_dtype(hidden.dtype)
    buffers = TileBuffers(tile, hidden, second=with_entropy)
    bias = None if bias is None else bias.to(wide)
    total = TokenStatistics.empty(hidden.size(0), wide, hidden.device, with_entropy)
    for tokens in spans(hidden.size(0), tile.tokens):
        part = total.rows(tokens)
        for columns in spans(weight.size(0), tile.columns):
            x = buffers.logits(hidden[tokens], weight[columns], None if bias is None else bias[columns])
            column, here = _columns_of_labels(labels[tokens], columns)
            torch.where(here, x.gather(1, column).squeeze(1), part.label_logit, out=part.label_logit)
            part.rebase_(torch.maximum(part.maximum, x.amax(1)), bits_per_logit)
            z = exponents_(x, part.maximum, bits_per_logit, may_be_infinite=bias is not None)
            p = torch.exp2(z, out=buffers.second(z))
            part.sum_exp.add_(p.sum(1))
            if part.weighted_exponents is not None:
                part.weighted_exponents.add_(p.mul_(z).sum(1))
    return total


def _columns_of_labels(labels: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(t, 1) the label's column within the tile, clamped into it, and (t,) whether it is there at all."""
    column = labels - columns.start
    here = (column >= 0) & (column < columns.stop - columns.start)
    return column.clamp_(0, columns.stop - columns.start - 1).unsqueeze(1), here


@dataclass
class LogitGradient:
    """d loss / d logits, a tile at a time. All (T,) in the accumulation dtype.

    With c = log2(e) / temperature, z = (x - normaliser) * c, p = 2**z, gradients g of the log-probability and e of the
    entropy H:

        d x_j = g / temperature * [j = label] - p_j * (a + b * z_j)
        a = (g + e * H) / temperature,   b = e * ln 2 / temperature

    because d H / d x_j = -p_j * (ln p_j + H) / temperature. Without a gradient of the entropy `slope` (b) is None.
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

    def tile(self, logits: Tensor, labels: Tensor, columns: slice, buffers: TileBuffers) -> Tensor:
        """(t, v) the gradient of the raw `logits` (t, v) of `columns`, which are overwritten; `self` has t tokens."""
        z = exponents_(logits, self.normaliser, self.bits_per_logit, may_be_infinite=self.slope is not None)
        p = torch.exp2(z, out=buffers.second(z))
        if self.slope is None:
            grad = p.mul_(-self.level.unsqueeze(1))
        else:
            grad = p.mul_(z.mul_(-self.slope.unsqueeze(1)).sub_(self.level.unsqueeze(1)))
        column, here = _columns_of_labels(labels, columns)
        return grad.scatter_add_(1, column, (self.label_grad * here).unsqueeze(1))


@dataclass
class Gradients:
    """Where a sweep puts its results, each None where it is not wanted.

    `hidden` (T, H) in the accumulation dtype and `bias` (V,) likewise are added to. `weight` (V, H) of any dtype is
    added to, or written where `weight_is_fresh` (its contents are then undefined before).
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    weight_is_fresh: bool


def sweep(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    gradient: LogitGradient,
    out: Gradients,
    tile: Tile,
) -> None:
    """Compute every logit of `hidden` (T, H) x `weight` (V, H) again and add its share to the gradients in `out`.

    Columns are the outer loop, so that a tile of the weight's gradient is complete, and leaves the accumulation dtype,
    once.
    """
    wide = accumulation_dtype(hidden.dtype)
    buffers = TileBuffers(tile, hidden, second=gradient.slope is not None)
    bias = None if bias is None else bias.to(wide)
    for columns in spans(weight.size(0), tile.columns):
        weight_tile = weight[columns]
        weight_sum = None if out.weight is None else _WeightTile(out.weight[columns], wide, out.weight_is_fresh)
        for tokens in spans(hidden.size(0), tile.tokens):
            x = buffers.logits(hidden[tokens], weight_tile, None if bias is None else bias[columns])
            wide_grad = gradient.rows(tokens).tile(x, labels[tokens], columns, buffers)
            if out.bias is not None:
                out.bias[columns].add_(wide_grad.sum(0))
            grad = buffers.narrow(wide_grad)
            if out.hidden is not None:
                add_product_(out.hidden[tokens], grad, weight_tile)
            if weight_sum is not None:
                weight_sum.add(grad.t(), hidden[tokens], only=tile.tokens >= hidden.size(0))
        if weight_sum is not None:
            weight_sum.finish()


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, where `total` may be wider than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(torch.mm(left, right))


class _WeightTile:
    """One tile of the weight's gradient: summed over the tokens in the accumulation dtype, then put in its place."""

    def __init__(self, place: Tensor, wide: torch.dtype, fresh: bool) -> None:
        self.place, self.wide, self.fresh = place, wide, fresh
        self.sum: Tensor | None = place if place.dtype == wide else None
        if fresh and self.sum is not None:
            self.sum.zero_()

    def add(self, left: Tensor, right: Tensor, only: bool) -> None:
        """Add left @ right. With `only` there is nothing else to add, so that no accumulator is needed."""
        if only and self.fresh and self.place.dtype == left.dtype:
            torch.mm(left, right, out=self.place)
            return
        if self.sum is None:
            self.sum = torch.zeros(self.place.shape, dtype=self.wide, device=self.place.device)
        add_product_(self.sum, left, right)

    def finish(self) -> None:
        if self.sum is None or self.sum is self.place:
            return
        if self.fresh:
            self.place.copy_(self.sum)
        else:
            self.place.add_(self.sum)
