"""Lets megatron-core 0.16.1 and 0.19.2 run on a host without CUDA, over gloo. Never used on a CUDA host.

Megatron writes ``device="cuda"`` and ``.cuda()`` in its calls, compares ``tensor.type()`` with CUDA's names, and keeps
a tracker of CUDA random states. Inside ``CudaCallsOnCpu`` those land on the CPU; all of this can go when Megatron
asks ``torch.accelerator`` instead.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CudaCallsOnCpu(TorchFunctionMode):
    """Within this context, the CPU serves this thread's requests for a CUDA device: factory and conversion calls get
    another device, and ``type()`` answers with CUDA's spelling."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.to:
            args = tuple("cpu" if _is_cuda(argument) else argument for argument in args)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def activate() -> None:
    """Replace Megatron calls that need CUDA random states or streams, or more than gloo offers. Safe to call twice."""
    from megatron.core.tensor_parallel import random

    # There are no CUDA random states to switch between: dropout draws from the CPU's own generator.
    random._CUDA_RNG_STATE_TRACKER = SimpleNamespace(
        get_states=dict, set_states=lambda states: None, fork=lambda name="": contextlib.nullcontext()
    )
    random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True
    # Activation recompute saves and restores both CUDA's state and the CPU's; the latter is saved anyway.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    torch.cuda.synchronize = lambda device=None: None  # at the end of loads that replicas share
    torch.cuda.current_stream = lambda device=None: None  # 0.19.2 asks for it before each reduction of gradients
    _dispatch_without_streams()
    _exchange_unequal_parts()
    _gather_buffers_one_by_one()


def _dispatch_without_streams() -> None:
    """The token dispatcher of experts copies its counts to the host on its own CUDA stream; here they already are."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def counts_on_host(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        if point == dispatcher.cuda_dtoh_point:
            for name in ("input_splits", "output_splits"):
                counts = getattr(dispatcher, name)
                setattr(dispatcher, name, None if counts is None else counts.tolist())
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = "none"  # with None it would make one
    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = counts_on_host


def _exchange_unequal_parts() -> None:
    """Experts sharded over TP gather and reduce as many rows as each rank has, but gloo's calls need equal parts. Can
    go once they do not (for gathers: https://github.com/pytorch/pytorch/issues/156627)."""
    from megatron.core.tensor_parallel import mappings

    gather = inspect.unwrap(mappings._gather_along_first_dim)
    reduce_scatter = inspect.unwrap(mappings._reduce_scatter_along_first_dim)

    @functools.wraps(gather)
    def gather_parts(
        input_: Tensor, group: Any, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        parts = [input_.new_empty((rows, *input_.shape[1:])) for rows in output_split_sizes]
        parts[group.rank()].copy_(input_)
        for rank, part in enumerate(parts):
            if part.numel():
                torch.distributed.broadcast(part, src=torch.distributed.get_global_rank(group, rank), group=group)
        return torch.cat(parts)

    @functools.wraps(reduce_scatter)
    def reduce_parts(
        input_: Tensor, group: Any, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
    ) -> Tensor:
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(input_split_sizes)[group.rank()].clone()

    mappings._gather_along_first_dim = gather_parts
    mappings._reduce_scatter_along_first_dim = reduce_parts


def _gather_buffers_one_by_one() -> None:
    """Gloo mixes up buffers of different types, such as FP8 weights and the others, when it gathers them as one. Can
    go once https://github.com/pytorch/pytorch/issues/35671 is solved."""
    from megatron.core.distributed import param_and_grad_buffer

    together = torch.distributed._coalescing_manager
    started = torch.distributed.distributed_c10d._world.pg_coalesce_state

    @contextlib.contextmanager
    def one_by_one(group: Any, async_ops: bool = False) -> Iterator[Any]:
        if not async_ops:
            yield None
            return
        with together(group, async_ops=True) as handle:
            yield handle
            _, *others = operations = started[group]
            started[group] = operations[:1]
        for operation in others:
            with together(group, async_ops=True) as single:
                started[group].append(operation)
            handle.works += single.works

    param_and_grad_buffer._coalescing_manager = one_by_one
