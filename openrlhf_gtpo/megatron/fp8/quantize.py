"""Converts values to FP8 and back, on any device: Transformer Engine's arithmetic of scales, in torch.

A scale is float32. Values are multiplied by it before rounding (nearest, ties to even, saturating), and by its inverse
when converted back. Scales are not rounded to powers of two (``NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`` in Transformer
Engine).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.options import BLOCK

Block = tuple[int, int] | None  # (m, n) rows and columns that share a scale; None for the whole matrix

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS, COLUMNS, SQUARES = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)
_CHUNK = 2**18  # elements per chunk, so that float32 temporaries stay in a CPU's cache


class Quantized(NamedTuple):
    """A matrix in FP8.

    Fields:
        data: (M, N) float8.
        scale: the factor of the values: () for the whole, or (⌈M / m⌉, ⌈N / n⌉) for blocks of m × n.
        block: (m, n); None for the whole.
    """

    data: Tensor
    scale: Tensor
    block: Block = None

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the (M, N) values: number times inverse scale, rounded to ``dtype``."""
        out = torch.empty(self.data.shape, dtype=dtype, device=self.data.device)
        numbers = torch.arange(256, dtype=torch.uint8, device=out.device).view(self.data.dtype).float()
        inverse = self.scale.reciprocal()
        if self.block is None:
            numbers = (numbers * inverse).to(dtype)
        for rows in _chunks(self.data):
            # On a CPU, a table lookup is several times faster than torch's conversion, with the same result.
            codes = self.data[rows].contiguous().view(torch.uint8).flatten().int()
            values = numbers.index_select(0, codes).view(-1, out.shape[1])
            out[rows] = values if self.block is None else values.mul_(_spread(inverse, self.block, rows, out.shape[1]))
        return out


def amax_of(values: Tensor, block: Block = None) -> Tensor:
    """Return the largest magnitudes of (M, N) values: () or (⌈M / m⌉, ⌈N / n⌉) float32; 0 if there are no values."""
    if not values.numel():
        return torch.zeros([] if block is None else grid(values.shape, block), device=values.device)
    if block is None:
        low, high = values.aminmax()
        return torch.maximum(-low, high).float()
    amax = torch.empty(grid(values.shape, block), device=values.device)
    for rows in _chunks(values):
        part = values[rows]
        padded = F.pad(part, (0, -part.shape[1] % block[1], 0, -part.shape[0] % block[0]))
        tiles = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
        amax[_blocks_of(rows, block)] = tiles.abs().amax(dim=(1, 3))
    return amax


def scale_of(amax: Tensor, dtype: torch.dtype, overflow: torch.dtype = torch.float32) -> Tensor:
    """Return the scale that maps ``amax`` (float32) to ``dtype``'s largest number; 1 where it is 0 or not finite.

    Args:
        overflow: the dtype whose largest number replaces a quotient that overflows. Transformer Engine uses float32
            for a whole matrix, and the values' own dtype for blocks.
    """
    # A quotient of two tensors is rounded once; for a number and a tensor, torch rounds the reciprocal and the product
    # (torch 2.13.0, _tensor.py, Tensor.__rdiv__).
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = torch.where(scale.isinf(), torch.finfo(overflow).max, scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def quantize(values: Tensor, dtype: torch.dtype, scale: Tensor, block: Block = None) -> Quantized:
    """Quantize (M, N) values with one scale or one per block. Values beyond the largest number saturate."""
    data = torch.empty(values.shape, dtype=dtype, device=values.device)
    limit = torch.finfo(dtype).max
    for rows in _chunks(values):
        factor = scale if block is None else _spread(scale, block, rows, values.shape[1])
        data[rows] = (values[rows].float() * factor).clamp_(-limit, limit).to(dtype)
    return Quantized(data, scale, block)


def quantize_blocks(values: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Quantized:
    """Quantize (M, N) values with one scale for each block."""
    return quantize(values, dtype, scale_of(amax_of(values, block), dtype, values.dtype), block)


def grid(shape: Sequence[int], block: tuple[int, int]) -> list[int]:
    """Number of blocks along each side of a matrix; those at the right and lower edge may be smaller."""
    return [-(-size // side) for size, side in zip(shape, block, strict=True)]


def _chunks(values: Tensor) -> Iterator[slice]:
    """Slices of a matrix's rows that keep scaled blocks whole; none if the matrix has no columns."""
    height, width = values.shape
    step = max(BLOCK, _CHUNK // max(width, 1) // BLOCK * BLOCK)
    return (slice(start, min(start + step, height)) for start in range(0, height if width else 0, step))


def _blocks_of(rows: slice, block: tuple[int, int]) -> slice:
    return slice(rows.start // block[0], -(-rows.stop // block[0]))


def _spread(scale: Tensor, block: tuple[int, int], rows: slice, width: int) -> Tensor:
    """Expand one number per block to one per element of ``rows``; a side of one needs no expansion."""
    scale = scale[_blocks_of(rows, block)]
    for dim, size in enumerate((rows.stop - rows.start, width)):
        if block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, size)
    return scale
