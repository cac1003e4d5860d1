"""The process group that joins the trainer's rank 0 with every vLLM worker: NCCL between GPUs, gloo without them."""

import socket
import time
from collections.abc import Callable
from typing import Protocol

import torch

# gloo gives up on a peer that never answers after half an hour only.
_POLL_SECONDS = 0.002


# Waits for a broadcast; what it is given runs meanwhile, and may raise to give up.
Finish = Callable[[Callable[[], None]], None]


class BroadcastGroup(Protocol):
    """What both ends need of a group: one collective, rooted at rank 0."""

    def start(self, tensor: torch.Tensor) -> Finish:
        """Begin to send from rank 0 into the others' ``tensor``, which stays untouched until the result returns."""


class _GlooGroup:
    def __init__(self, host: str, port: int, rank: int, world_size: int, listener: socket.socket | None) -> None:
        from vllm.distributed.utils import stateless_init_torch_distributed_process_group

        self._group = stateless_init_torch_distributed_process_group(
            host, port, rank, world_size, backend="gloo", listen_socket=listener
        )

    def start(self, tensor: torch.Tensor) -> Finish:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = self._group.broadcast([tensor], options)

        def finish(check: Callable[[], None]) -> None:
            while not work.is_completed():
                check()
                time.sleep(_POLL_SECONDS)
            work.wait()

        return finish


class _NcclGroup:
    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device | int,
        listener: socket.socket | None,
    ) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        group = StatelessProcessGroup.create(
            host=host, port=port, rank=rank, world_size=world_size, listen_socket=listener
        )
        self._communicator = PyNcclCommunicator(group, device=device)

    def start(self, tensor: torch.Tensor) -> Finish:
        self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        return lambda check: check()  # only enqueued: waiting is left to the stream


def join(
    host: str, port: int, rank: int, world_size: int, device: torch.device, listener: socket.socket | None = None
) -> BroadcastGroup:
    """Join the group as ``rank`` of ``world_size``; returns when all have joined.

    Args:
        listener: of rank 0, what :func:`listen` gave; the group owns it from here on.
    """
    if device.type == "cpu":
        return _GlooGroup(host, port, rank, world_size, listener)
    return _NcclGroup(host, port, rank, world_size, device, listener)


def listen() -> socket.socket:
    """A socket for the group's meeting, at a port of its own.

    It stays open: a port that is only free may be another process's before vLLM is imported and listens at it.
    """
    return socket.create_server(("", 0))
