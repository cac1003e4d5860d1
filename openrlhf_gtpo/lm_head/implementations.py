"""Which implementation does the work on tiles of logits."""

import importlib.util
from typing import Literal

import torch
from torch import Tensor

from .portable import PortableTile
from .sweeps import TileWork

Implementation = Literal["auto", "portable", "triton"]


def choose(implementation: Implementation, hidden: Tensor) -> type[TileWork]:
    """The class that works on tiles of what comes from `hidden`.

    Raises:
        ValueError: an unknown name, Triton where it is not installed, or on a CPU without its interpreter.
    """
    if implementation not in ("auto", "portable", "triton"):
        raise ValueError(f"implementation must be auto, portable or triton, but it is {implementation!r}")
    has_triton = importlib.util.find_spec("triton") is not None
    automatic = implementation == "auto"
    if implementation == "portable" or hidden.dtype == torch.float64:
        return PortableTile
    if automatic and not (hidden.is_cuda and has_triton):
        return PortableTile
    if not has_triton:
        raise ValueError("implementation is triton, and the package triton is not installed")
    if not hidden.is_cuda:
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ValueError(
                f"implementation is triton, but hidden is on {hidden.device}: its kernels need a CUDA device, or "
                "TRITON_INTERPRET=1"
            )
    from .kernels import TritonTile

    return TritonTile
