"""The operations on one tile of logits in Triton, for CUDA: one kernel reads a tile once for all statistics, another
turns the tile into its gradient in place. `TRITON_INTERPRET=1` runs them on a CPU, for tests.

cuBLAS computes the product. With H in the thousands it takes nearly all of the time, and a tile of the budget's size
costs one write and one read of memory. For the statistics, each row of a tile is one program, so no statistic is
shared between programs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .softmax import LOWEST_EXPONENT, LogitGradient, TokenStatistics
from .tiles import Tile, fused_bytes_per_logit

_LOWEST = tl.constexpr(LOWEST_EXPONENT)
_FINITE = tl.constexpr(-3e38)  # keeps a maximum finite, because -inf - -inf is NaN
# Columns of a row at a time. Many rows fill a device with a few warps each; an engine's few rows need many warps
# (docs/results/h200.md).
_MANY_ROWS = 1024
BLOCK_OF_MANY, BLOCK_OF_FEW = 4096, 16384
_COLUMNS_PER_WARP = 1024
GRADIENT_BLOCK, _GRADIENT_WARPS = 2048, 8


class TritonTile:
    """A `TileWork` that holds only the product, in the dtype of the inputs, which must be at most float32."""

    def __init__(self, tile: Tile, like: Tensor, second: bool) -> None:
        self._memory = torch.empty(tile.tokens * tile.columns, dtype=like.dtype, device=like.device)

    @staticmethod
    def bytes_per_logit(item: int, wide: int, second: bool) -> int:
        return fused_bytes_per_logit(item, wide, second)

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        shape = (hidden.size(0), weight.size(0))
        return torch.mm(hidden, weight.t(), out=self._memory[: shape[0] * shape[1]].view(shape))

    @classmethod
    def statistics(cls, logits: Tensor, labels: Tensor, bits_per_logit: float) -> TokenStatistics:
        total = TokenStatistics.empty(len(logits), torch.float32, logits.device, with_entropy=True)
        cls.absorb(logits, None, labels, total, bits_per_logit)
        return total

    @staticmethod
    def absorb(
        product: Tensor, bias: Tensor | None, labels: Tensor, total: TokenStatistics, bits_per_logit: float
    ) -> None:
        tokens, columns = product.shape
        block = BLOCK_OF_MANY if tokens >= _MANY_ROWS else BLOCK_OF_FEW
        block = min(block, triton.next_power_of_2(columns))
        _absorb[(tokens,)](
            product,
            bias,
            labels,
            total.maximum,
            total.sum_exp,
            total.weighted_exponents,
            total.label_logit,
            columns,
            product.stride(0),
            bits_per_logit,
            HAS_BIAS=bias is not None,
            WITH_ENTROPY=total.weighted_exponents is not None,
            BLOCK=block,
            num_warps=max(1, block // _COLUMNS_PER_WARP),
        )

    def gradient(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, logit_grad: LogitGradient, bias_sum: Tensor | None
    ) -> Tensor:
        tokens, columns = product.shape
        block = min(GRADIENT_BLOCK, triton.next_power_of_2(columns))
        _gradient[(tokens, triton.cdiv(columns, block))](
            product,
            bias,
            labels,
            logit_grad.normalizer,
            logit_grad.label_grad,
            logit_grad.level,
            logit_grad.slope,
            columns,
            logit_grad.bits_per_logit,
            HAS_BIAS=bias is not None,
            WITH_SLOPE=logit_grad.slope is not None,
            BLOCK=block,
            num_warps=_GRADIENT_WARPS,
        )
        if bias_sum is not None:
            bias_sum.add_(product.sum(0, dtype=bias_sum.dtype))
        return product


@triton.jit
def _absorb(  # type: ignore[no-untyped-def]
    logits,
    bias,
    labels,
    maximum,
    sum_exp,
    weighted_exponents,
    label_logit,
    columns,
    row_stride,
    bits_per_logit,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add one row to its statistics, like `TokenStatistics.merge_`, a block of columns at a time."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    top = tl.load(maximum + row)
    total = tl.load(sum_exp + row)
    weighted = 0.0
    if WITH_ENTROPY:
        weighted = tl.load(weighted_exponents + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(logits + column, mask=inside, other=float("-inf")).to(tl.float32)
        if HAS_BIAS:
            x += tl.load(bias + column, mask=inside, other=0.0)
        above = tl.maximum(tl.maximum(top, tl.max(x, 0)), _FINITE)
        shift = tl.maximum((top - above) * bits_per_logit, _LOWEST)
        factor = tl.exp2(shift)
        z = tl.maximum((x - above) * bits_per_logit, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
        p = tl.exp2(z)
        if WITH_ENTROPY:
            weighted = (weighted + shift * total) * factor + tl.sum(p * z, 0)
        total = total * factor + tl.sum(p, 0)
        top = above
    tl.store(maximum + row, top)
    tl.store(sum_exp + row, total)
    if WITH_ENTROPY:
        tl.store(weighted_exponents + row, weighted)
    label = tl.load(labels + row)
    if (label >= 0) & (label < columns):
        value = tl.load(logits + label).to(tl.float32)
        if HAS_BIAS:
            value += tl.load(bias + label)
        tl.store(label_logit + row, value)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    logits,
    bias,
    labels,
    normalizer,
    label_grad,
    level,
    slope,
    columns,
    bits_per_logit,
    HAS_BIAS: tl.constexpr,
    WITH_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Turn a block of one row into its gradient in place, by the formula of `LogitGradient`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    place = logits + row * columns + column
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=inside, other=0.0)
    z = tl.maximum((x - tl.load(normalizer + row)) * bits_per_logit, _LOWEST, propagate_nan=tl.PropagateNan.ALL)
    factor = tl.load(level + row)
    if WITH_SLOPE:
        factor += tl.load(slope + row) * z
    grad = -tl.exp2(z) * factor
    grad += tl.where(column == tl.load(labels + row), tl.load(label_grad + row), 0.0)
    tl.store(place, grad.to(logits.dtype.element_ty), mask=inside)
