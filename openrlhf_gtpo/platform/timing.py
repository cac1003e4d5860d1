"""Seconds that something takes on this process's device."""

import time
from collections.abc import Callable
from typing import Any

import torch


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
