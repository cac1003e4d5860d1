"""Merging adapters into weights that keep what nearest rounding would lose.

A checkpoint's weights are bfloat16. Most updates of a small step are less than half of the distance to the next
number, so W + Δ would round to W, and the engines would sample from a policy that hardly moves. Here an element is
rounded up where the truncated part exceeds its threshold, uniform between 0 and 1, a hash of row, column and name. The
mean over elements is then right, as with stochastic rounding, but without a random state. The same adapters always
give the same weights, W + 0 is W, and a larger Δ never gives a smaller weight.
"""

import zlib

import torch
from torch import Tensor

_ROWS, _COLUMNS, _MIX = 0x9E3779B1, 0x85EBCA77, 0x2C1B3C6D  # odd, with well-mixed bits
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 lacks


@torch.no_grad()
def merge(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    scale: float,
    name: str,
    offset: tuple[int, int] = (0, 0),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``weight`` + ``scale`` · B·A, (O, I), in bfloat16, dithered as above, or in float32.

    Args:
        weight: (O, I), a part of the matrix ``name``, whose first element is at ``offset`` in it.
        a: (r, I), the same columns of A.
        b: (O, r), the same rows of B.
        name: Hugging Face's name of the weight, the same on every rank and backend.
        dtype: the result's; by default the dtype of ``weight``.
    """
    merged = torch.empty_like(weight, dtype=dtype)
    assert merged.dtype in (torch.bfloat16, torch.float32), f"{name} is {merged.dtype}"
    block = 2**17 if weight.device.type == "cpu" else 2**24  # elements at a time: a core's cache, or much of a GPU
    rows = max(1, block // weight.shape[1])
    a = a.float()
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        exact = torch.addmm(weight[part].float(), b[part].float(), a, alpha=scale)
        if merged.dtype == torch.bfloat16:
            bits = exact.view(torch.int32)
            bits += thresholds(exact.shape, name, (offset[0] + start, offset[1]), weight.device)
            bits &= ~_LOW
        merged[part] = exact
    return merged


def thresholds(
    shape: tuple[int, ...], name: str, offset: tuple[int, int] = (0, 0), device: torch.device | None = None
) -> Tensor:
    """Return uniform integers from 0 to 65,535, (O, I), int32, for the part of the matrix ``name`` at ``offset``. They
    are added to the bits of a float32 before it is truncated to bfloat16."""
    seed = zlib.crc32(name.encode())
    row, column = (
        (torch.arange(start, start + size, dtype=torch.int64, device=device) * factor + addend) & 0xFFFFFFFF
        for start, size, factor, addend in zip(offset, shape, (_ROWS, _COLUMNS), (seed, 0), strict=True)
    )
    # In int32, products wrap around. A shift to the right keeps the sign, and the mask removes it.
    mixed = _wrapped(row)[:, None] + _wrapped(column)
    mixed ^= mixed >> 15
    mixed *= _MIX
    return mixed.bitwise_right_shift_(16).bitwise_and_(_LOW)


def _wrapped(values: Tensor) -> Tensor:
    """Convert numbers below 2**32 to the int32 with the same bits."""
    return torch.where(values >= 2**31, values - 2**32, values).int()
