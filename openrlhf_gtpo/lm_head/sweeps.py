"""The two passes over the logits of one vocabulary shard, tile by tile: forward (statistics) and backward (gradients).

Owns the loops, the products and the sums of gradients. What is done to a tile of logits between the products is a
`TileWork`: `portable` in torch, `kernels` in Triton. Knows no autograd and no process group: columns are the shard's own,
and a label outside [0, columns) belongs to another shard.

Products are taken in the dtype of the inputs, everything after them in `accumulation_dtype`. Tiles follow Flash Attention
(arXiv 2205.14135) and Cut Cross-Entropy (arXiv 2411.09009).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .gradient import LogitGradient
from .statistics import TokenStatistics
from .tiles import Tile


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32; float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spans(length: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover range(length)."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


class TileWork(Protocol):
    """An implementation's memory for one tile, reused by all tiles of a sweep, and what it does with logits there.

    A tile is (t, v). Its labels (t,) are columns of the tile; those outside [0, v) are not among them. The bias (v,) is in
    the accumulation dtype.
    """

    def __init__(self, tile: Tile, like: Tensor, second: bool) -> None:
        """`like` has the dtype and device of the inputs; `second`: an entropy, or its gradient, is asked for."""

    @staticmethod
    def bytes_per_logit(item: int, wide: int, second: bool) -> int:
        """That this memory takes; `item` and `wide` are the sizes of an input's and an accumulator's element."""

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """hidden (t, H) x weight (v, H), in the dtype of the inputs; what is there before is lost."""

    def absorb(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, total: TokenStatistics, bits_per_logit: float
    ) -> None:
        """Add the columns of the tile to `total`."""

    def gradient(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, of: LogitGradient, bias_sum: Tensor | None
    ) -> Tensor:
        """The gradient of the logits in the dtype of the inputs, in the product's memory; `bias_sum` (v,) gets its sum
        over the tokens."""


def token_statistics(
    work: type[TileWork],
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
    memory = work(tile, hidden, with_entropy)
    bias = None if bias is None else bias.to(wide)
    total = TokenStatistics.empty(hidden.size(0), wide, hidden.device, with_entropy)
    for tokens in spans(hidden.size(0), tile.tokens):
        for columns in spans(weight.size(0), tile.columns):
            product = memory.product(hidden[tokens], weight[columns])
            tile_bias = None if bias is None else bias[columns]
            memory.absorb(product, tile_bias, labels[tokens] - columns.start, total.rows(tokens), bits_per_logit)
    return total


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
    work: type[TileWork],
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
    memory = work(tile, hidden, gradient.slope is not None)
    bias = None if bias is None else bias.to(wide)
    for columns in spans(weight.size(0), tile.columns):
        weight_tile = weight[columns]
        weight_sum = None if out.weight is None else _WeightTile(out.weight[columns], wide, out.weight_is_fresh)
        for tokens in spans(hidden.size(0), tile.tokens):
            grad = memory.gradient(
                memory.product(hidden[tokens], weight_tile),
                None if bias is None else bias[columns],
                labels[tokens] - columns.start,
                gradient.rows(tokens),
                None if out.bias is None else out.bias[columns],
            )
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
    elif total.is_cuda:  # cuBLAS adds to a wider matrix, without a partial product of its own
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
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
