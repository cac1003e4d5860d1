"""How a bucket gets from the trainer to engines: by a broadcast (NCCL between GPUs, gloo without them), or in shared
memory (CUDA IPC on the same GPU, or without one a file in memory), which the trainer fills and engines map.
"""

import os
import pickle
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE
from openrlhf_gtpo.weight_sync.receipts import WeightSyncError

# gloo gives up on a peer that never answers only after half an hour.
_POLL_SECONDS = 0.002

# Waits for a broadcast, and meanwhile calls its argument, which may raise to give up.
Finish = Callable[[Callable[[], None]], None]
# Begins to send rank 0's tensor into the others'; all of them must stay untouched until the result has returned.
Broadcast = Callable[[torch.Tensor], Finish]


def join(
    host: str, port: int, rank: int, world_size: int, device: torch.device, listener: socket.socket | None = None
) -> Broadcast:
    """Join the trainer's rank 0 and every vLLM worker as ``rank`` of ``world_size``; returns when all have joined.

    Args:
        listener: on rank 0, the socket where they meet, on ``port``; the group owns it from here on.

    Raises:
        WeightSyncError: vLLM's NCCL is switched off.
    """
    from vllm.distributed.utils import StatelessProcessGroup, stateless_init_torch_distributed_process_group

    if device.type != "cpu":
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        meeting = StatelessProcessGroup.create(
            host=host, port=port, rank=rank, world_size=world_size, listen_socket=listener
        )
        communicator = PyNcclCommunicator(meeting, device=device)
        if communicator.disabled:  # it would silently send and receive nothing
            raise WeightSyncError("vLLM's NCCL is off: unset VLLM_DISABLE_PYNCCL, or see why libnccl does not load.")

        def start_nccl(tensor: torch.Tensor) -> Finish:
            communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            return lambda check: check()  # only enqueued: waiting is left to the stream

        return start_nccl

    group = stateless_init_torch_distributed_process_group(
        host, port, rank, world_size, backend="gloo", listen_socket=listener
    )

    def start_gloo(tensor: torch.Tensor) -> Finish:
        options = torch.distributed.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        work = group.broadcast([tensor], options)

        def finish(check: Callable[[], None]) -> None:
            while not work.is_completed():
                check()
                time.sleep(_POLL_SECONDS)
            work.wait()

        return finish

    return start_gloo


def memory_of(device: torch.device) -> str:
    """Name of the memory that processes can share: the physical GPU, whatever each process calls it, or the host."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


@contextmanager
def shared_buffer(numel: int, device: torch.device) -> Iterator[tuple[torch.Tensor, bytes]]:
    """A flat tensor (``numel``,) on ``device`` and the handle by which other processes can open it, until the end of
    the context.

    Raises:
        OSError: a host without CUDA has no room for them.
    """
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        tensor = torch.empty(numel, dtype=WIRE_DTYPE, device=device)
        yield tensor, pickle.dumps(reduce_tensor(tensor))
        return
    # A file without a name: it goes when its last user ends, in whatever way. torch's shared memory counts its users
    # on the assumption that each handle is opened once (torch 2.13.0, multiprocessing/reductions.py, reduce_storage),
    # and here every engine opens it.
    file = os.memfd_create("weights")
    try:
        os.posix_fallocate(file, 0, max(1, numel * WIRE_DTYPE.itemsize))
        path = f"/proc/{os.getpid()}/fd/{file}"
        yield _map(path, numel), pickle.dumps((path, numel))
    finally:
        os.close(file)


def open_shared(handle: bytes, device: torch.device) -> torch.Tensor:
    """The buffer (N,) behind ``handle`` as a tensor of this process."""
    if device.type == "cuda":
        rebuild, arguments = pickle.loads(handle)
        # Without the sender's number of the GPU: the two processes may see different ones.
        return rebuild(*arguments[:6], device.index, *arguments[7:])
    return _map(*pickle.loads(handle))


def _map(path: str, numel: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=WIRE_DTYPE)
