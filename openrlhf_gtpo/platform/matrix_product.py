"""The rate of a big square matrix product: what this process's device multiplies at best, and MFU is a share of."""

import torch

from openrlhf_gtpo.platform.timing import seconds_of

_PRODUCTS = 10


class SquareProduct:
    """A product of two random (n, n) matrices, computed once so that the next ones are warm.

    Args:
        side: n.
        dtype: of both matrices and of the result.
    """

    def __init__(self, side: int, dtype: torch.dtype = torch.bfloat16) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right = (
            torch.randn(side, side, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        self._out = torch.empty_like(self._left)
        self._multiply(1)

    def rate(self) -> float:
        """FLOP/s of ten products; a multiplication and an addition are two."""
        seconds = seconds_of(lambda: self._multiply(_PRODUCTS))
        return _PRODUCTS * 2 * self._out.size(0) ** 3 / seconds

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._left, self._right, out=self._out)
