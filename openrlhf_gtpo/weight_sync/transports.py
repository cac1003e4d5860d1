"""Transports of a bucket from the trainer to engines: a broadcast (NCCL between GPUs, gloo on CPUs), or shared memory
that the trainer fills and engines map (CUDA IPC on the same GPU, a file in memory on CPUs).
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

# gloo waits half an hour for a peer that never answers.
_POLL_SECONDS = 0.002

# Waits for a broadcast. Meanwhile calls its argument, which may raise to abort.
Finish = Callable[[Callable[[], None]], None]
# Starts to send rank 0's tensor into the others'. All tensors must stay untouched until the result has returned.
Broadcast = Callable[[torch.Tensor], Finish]


def join(
    host: str, port: int, rank: int, world_size: int, device: torch.device, listener: socket.socket | None = None
) -> Broadcast:
    """Join the trainer's rank 0 and all vLLM workers, as ``rank`` of ``world_size``; returns when all have joined.

    Args:
        listener: on rank 0, the rendezvous socket on ``port``, which the group then owns.

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
        if communicator.disabled:  # with NCCL off, it would silently send nothing
            raise WeightSyncError("vLLM's NCCL is off: unset VLLM_DISABLE_PYNCCL, or see why libnccl does not load.")

        def start_nccl(tensor: torch.Tensor) -> Finish:
            communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
            return lambda check: check()  # only enqueued; the stream waits

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
    """Name the memory that processes can share: the physical GPU, however each process numbers it, or the host."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


@contextmanager
def shared_buffer(numel: int, device: torch.device) -> Iterator[tuple[torch.Tensor, bytes]]:
    """Allocate a flat tensor (``numel``,) on ``device``, with a handle for other processes, until the end of the
    context.

    Raises:
        OSError: a host without CUDA has no room for it.
    """
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        tensor = torch.empty(numel, dtype=WIRE_DTYPE, device=device)
        yield tensor, pickle.dumps(reduce_tensor(tensor))
        return
    # A file without a name disappears with its last user, however that ends. torch's shared memory counts users and
    # assumes that each handle is opened once (torch 2.13.0, multiprocessing/reductions.py, reduce_storage), and here
    # every engine opens it.
    file = os.memfd_create("weights")
    try:
        os.posix_fallocate(file, 0, max(1, numel * WIRE_DTYPE.itemsize))
        path = f"/proc/{os.getpid()}/fd/{file}"
        yield _map(path, numel), pickle.dumps((path, numel))
    finally:
        os.close(file)


def open_shared(handle: bytes, device: torch.device) -> torch.Tensor:
    """Open the buffer (N,) behind ``handle`` as a tensor of this process."""
    if device.type == "cuda":
        rebuild, arguments = pickle.loads(handle)
        # Drop the sender's GPU number, because the two processes may number GPUs differently.
        return rebuild(*arguments[:6], device.index, *arguments[7:])
    return _map(*pickle.loads(handle))


def _map(path: str, numel: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=WIRE_DTYPE)
