"""Megatron's process groups for a layout, with the ranks of one model replica consecutive.

OpenRLHF hands each replica's batch to as many consecutive ranks as a replica has, so the data-parallel dimension is
outermost (Megatron's own order puts pipeline stages outside it). Experts are divided among the context-parallel ranks
of a replica, then among consecutive replicas; both dimensions lie outside the pipeline's, so attention and experts
have the same pipeline groups.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel

from openrlhf_gtpo.megatron.parallel import cpu_host
from openrlhf_gtpo.megatron.parallel.host import megatron_calls, on_cuda
from openrlhf_gtpo.megatron.parallel.layout import Layout


class _Order(str):
    """An order of dimensions that Megatron mistakes for one with pipeline stages outermost.

    For other orders megatron-core 0.16.1 and 0.19.2 (``initialize_model_parallel`` in megatron/core/parallel_state.py
    of github.com/NVIDIA/Megatron-LM) require equal data-parallel sizes of attention and experts, so that their
    pipeline groups are the same. They compare those groups right afterwards, and with pp inside cp and ep they are the
    same whatever the sizes. Can go once Megatron drops that condition in favor of the comparison.
    """

    def endswith(self, *args: Any) -> bool:
        return True


ORDER = _Order("tp-pp-cp-ep-dp")

# Megatron forgets most of its groups without closing them: https://github.com/NVIDIA/Megatron-LM/issues/6897. The code
# that closes them here can go once that is solved.
_made: list[torch.distributed.ProcessGroup] = []
_releases: list[Callable[[], Any]] = []


def initialize(layout: Layout, seed: int) -> None:
    """Create the groups of ``layout`` over the default process group, and seed Megatron's random states.

    Raises:
        ValueError: Megatron's groups already exist; ``destroy`` them first.
    """
    if parallel_state.model_parallel_is_initialized():
        raise ValueError("Megatron's process groups exist already in this process; destroy them first.")
    assert torch.distributed.is_initialized(), "torch.distributed comes first"
    if not on_cuda():
        cpu_host.activate()
    gc.collect()  # models of an earlier layout keep its groups' threads alive through reference cycles
    before = set(_all_groups())
    with megatron_calls(), _connected_when_used():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tensor_model_parallel_size,
            pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
            context_parallel_size=layout.context_parallel_size,
            expert_model_parallel_size=layout.expert_model_parallel_size,
            order=ORDER,
        )
    _made.extend(group for group in _all_groups() if group not in before)
    torch.manual_seed(seed)
    if on_cuda():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


@contextmanager
def _connected_when_used() -> Iterator[None]:
    """Let groups connect when they are first used. A default group with a device, such as DeepSpeed makes (0.19.6,
    comm/torch.py), has NCCL connect every new group at once, which takes GPU memory: a model on one GPU uses 3 of
    Megatron's 17."""
    default = torch.distributed.group.WORLD
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def at_destroy(release: Callable[[], Any]) -> None:
    """Call ``release`` when the groups are destroyed, to let go of objects that would keep their threads alive."""
    _releases.append(release)


def destroy() -> None:
    """Remove Megatron's groups and close their connections, so that another layout can be made in these processes."""
    while _releases:
        _releases.pop()()
    parallel_state.destroy_model_parallel()
    open_still = set(_all_groups())  # Megatron closes a few
    while _made:
        group = _made.pop()
        if group in open_still:
            torch.distributed.destroy_process_group(group)


def _all_groups() -> list[torch.distributed.ProcessGroup]:
    return list(torch.distributed.distributed_c10d._world.pg_map)


def is_first_replica() -> bool:
    """True on the ranks that together hold the first copy of the model; if replicas share the experts, those are the
    ranks of several replicas."""
    return bool(parallel_state.get_expert_data_parallel_rank() == 0)


def is_reporter() -> bool:
    """True on one rank of each replica: a last stage, which has the losses."""
    return bool(
        parallel_state.is_pipeline_last_stage()
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
    )
