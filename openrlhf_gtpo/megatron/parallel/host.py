"""The only place that knows Megatron's host: its device, its backend, its memory, and the context of every Megatron
call."""

import contextlib
import importlib.util
import weakref

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from openrlhf_gtpo.megatron.parallel import cpu_host


def on_cuda() -> bool:
    """True if this process computes on a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the device of this process's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def has_transformer_engine() -> bool:
    """True if layers come from Transformer Engine; otherwise they are this package's own."""
    return on_cuda() and importlib.util.find_spec("transformer_engine") is not None


def megatron_calls() -> contextlib.AbstractContextManager:
    """Return the context for calls of Megatron."""
    return contextlib.nullcontext() if on_cuda() else cpu_host.CudaCallsOnCpu()


class HostMemory:
    """Host memory for copies of device memory, reused, and pinned on CUDA hosts.

    It does not use ``pin_memory=True``, whose allocator rounds up to a power of two. With
    pinned_max_round_threshold_mb the allocator does not round, but torch 2.13 may then return less than requested
    (https://github.com/pytorch/pytorch/pull/192722).
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def buffer(self, size: int) -> torch.Tensor:
        """Return (size,) bytes. Previous contents are lost."""
        if self._bytes.numel() < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # freed before the larger one is allocated
            self._bytes = torch.empty(size, dtype=torch.uint8)
            if on_cuda():
                pin_memory(self._bytes.data_ptr(), size)
                weakref.finalize(self._bytes, unpin_memory, self._bytes.data_ptr()).atexit = False  # CUDA has ended
        return self._bytes[:size]
