"""Which host the engine runs on, asked in one place: its device, its backend, the context of every Megatron call."""

import contextlib
import importlib.util

import torch

from openrlhf_gtpo.megatron.parallel import cpu_host


def on_cuda() -> bool:
    """True where this process computes on a CUDA device."""
    return torch.cuda.is_available()


def device() -> torch.device:
    """The device of this process's tensors."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def has_transformer_engine() -> bool:
    """True where layers come from Transformer Engine; elsewhere they are this package's own."""
    return on_cuda() and importlib.util.find_spec("transformer_engine") is not None


def megatron_calls() -> contextlib.AbstractContextManager:
    """The context in which Megatron is called."""
    return contextlib.nullcontext() if on_cuda() else cpu_host.cuda_calls_on_cpu()
