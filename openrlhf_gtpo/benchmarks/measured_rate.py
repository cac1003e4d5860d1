"""How fast the GPUs of a run multiply: a big matrix product, timed where and on as many processes as the run trains.

GPUs are taken to be alike, so that one is measured; the processes that stand for GPUs on a CPU host share its cores, and
are measured together.
"""

import os
from typing import Any

import torch

from openrlhf_gtpo import platform
from openrlhf_gtpo.platform.matrix_product import SquareProduct
from openrlhf_gtpo.platform.processes import run_processes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
