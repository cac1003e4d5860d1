"""What measurements are held against: seconds on this process's device, and the rate of a big square matrix product, which MFU
is a share of.

GPUs are taken to be alike, so that one is measured; the processes that stand for GPUs on a CPU host share its cores, and
are measured together.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from openrlhf_gtpo import platform
from openrlhf_gtpo.platform.processes import run_processes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS = 10


def seconds_of(run: Callable[[], Any]) -> float:
    """Wall-clock seconds of ``run()``, what it has queued on a CUDA device included and nothing queued before it."""
    _synchronize()
    started = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - started


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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


def measured_rate(gpus: int, side: int, dtype: str) -> float:
    """FLOP/s of all ``gpus`` together, each multiplying (side, side) matrices of ``dtype`` ("bf16" or "fp16").

    Nothing else may be using them. With RAY_ADDRESS the cluster measures, elsewhere this host.
    """
    alike = platform.detect() == "cuda"
    measured = 1 if alike else gpus
    if os.environ.get("RAY_ADDRESS"):
        rate = _rate_on_cluster(measured, side, dtype)
    else:
        rate = run_processes(_rate_of_all, measured, side, dtype)
    return rate * gpus / measured


def _rate_of_all(side: int, dtype: str) -> float:
    """In each rank of the default group: the sum of the ranks' rates, measured at the same time."""
    product = SquareProduct(side, DTYPES[dtype])
    torch.distributed.barrier()
    rates: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rates, product.rate())
    return sum(rates)


def _rate_on_cluster(processes: int, side: int, dtype: str) -> float:
    import ray

    ray.init()
    try:
        product = ray.remote(num_gpus=1)(SquareProduct)
        made = [product.remote(side, DTYPES[dtype]) for _ in range(processes)]
        ray.get([one.__ray_ready__.remote() for one in made])
        return sum(ray.get([one.rate.remote() for one in made]))
    finally:
        ray.shutdown()
