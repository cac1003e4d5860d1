"""Values to FP8 and back, on any device: Transformer Engine's arithmetic of scales, in torch.

A scale is float32 and multiplies before the rounding (to nearest, ties to even, saturating); values come back multiplied by
its inverse. Scales are not rounded to powers of two (``NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1`` in Transformer Engine).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf_gtpo.megatron.fp8_options import BLOCK

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LARGEST_FLOAT = torch.finfo(torch.float32).max


class Quantized(NamedTuple):
    """A matrix in FP8.

    Fields:
        data: (M, N) float8.
        scale: what the values were multiplied by: () for the whole, or (⌈M / m⌉, ⌈N / n⌉) for blocks of m × n.
        block: (m, n); None for the whole.
    """

    data: Tensor
    scale: Tensor
    block: tuple[int, int] | None = None

    def dequantize(self) -> Tensor:
        """(M, N) float32."""
        inverse = self.scale.reciprocal()
        return self.data.float() * (inverse if self.block is None else _spread(inverse, self.block, self.data.shape))


def scale_of(amax: Tensor, dtype: torch.dtype, *, largest: float = _LARGEST_FLOAT) -> Tensor:
    """The scale that maps ``amax`` (any shape, float32) onto the largest number of ``dtype``.

    1 where ``amax`` is 0 or not finite; ``largest`` where the quotient overflows.
    """
    # A quotient of two tensors is rounded once; of a number and a tensor torch rounds the reciprocal and the product.
    scale = torch.full_like(amax, torch.finfo(dtype).max) / amax
    scale = torch.where(scale.isinf(), largest, scale)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def amax_of(values: Tensor) -> Tensor:
    """() largest magnitude, float32; 0 of nothing."""
    return values.abs().amax().float() if values.numel() else torch.zeros((), device=values.device)


def quantize(values: Tensor, dtype: torch.dtype, scale: Tensor) -> Quantized:
    """(M, N) values with one scale; beyond the largest number they saturate."""
    return Quantized(_round(values.float() * scale, dtype), scale)


def quantize_blocks(values: Tensor, dtype: torch.dtype, block: tuple[int, int]) -> Quantized:
    """(M, N) values with a scale for each block; those at the right and lower edge may be smaller."""
    exact = values.float()
    padded = torch.nn.functional.pad(exact, (0, -exact.shape[1] % block[1], 0, -exact.shape[0] % block[0]))
    tiled = padded.view(padded.shape[0] // block[0], block[0], padded.shape[1] // block[1], block[1])
    # Transformer Engine's kernels take the input's largest number where a quotient overflows.
    scale = scale_of(tiled.abs().amax(dim=(1, 3)), dtype, largest=torch.finfo(values.dtype).max)
    return Quantized(_round(exact * _spread(scale, block, values.shape), dtype), scale, block)


ROWS, COLUMNS, SQUARES = (1, BLOCK), (BLOCK, 1), (BLOCK, BLOCK)


def _round(values: Tensor, dtype: torch.dtype) -> Tensor:
    limit = torch.finfo(dtype).max
    return values.clamp(-limit, limit).to(dtype)


def _spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A number for each block to one for each of (M, N) places; of blocks one wide it is a view that broadcasts."""
    for dim in (0, 1):
        if block[dim] > 1:
            scale = scale.repeat_interleave(block[dim], dim).narrow(dim, 0, shape[dim])
    return scale
