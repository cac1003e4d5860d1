"""Memory that the trainer fills and an engine on the same GPU, or on the same host without one, maps and reads."""

import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE


@dataclass(frozen=True)
class SharedBuffer:
    """A flat ``tensor`` (N,) and the ``handle`` by which other processes open it."""

    tensor: torch.Tensor
    handle: bytes


def place(device: torch.device) -> str:
    """The memory that processes can share: the physical GPU, whatever each calls it, or the host."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return socket.gethostname()


@contextmanager
def shared_buffer(numel: int, device: torch.device) -> Iterator[SharedBuffer]:
    """``numel`` elements on ``device``, which other processes can open until the end of the context.

    Raises:
        OSError: a host without CUDA has no room for them.
    """
    if device.type == "cuda":
        from torch.multiprocessing.reductions import reduce_tensor

        tensor = torch.empty(numel, dtype=WIRE_DTYPE, device=device)
        yield SharedBuffer(tensor, pickle.dumps(reduce_tensor(tensor)))
        return
    # A file without a name, which ends with its last user however that ends. torch's own shared memory counts its users
    # on the assumption that each handle is opened once, and here every engine opens it.
    file = os.memfd_create("weights")
    try:
        os.posix_fallocate(file, 0, max(1, numel * WIRE_DTYPE.itemsize))
        path = f"/proc/{os.getpid()}/fd/{file}"
        yield SharedBuffer(_map(path, numel), pickle.dumps((path, numel)))
    finally:
        os.close(file)


def open_shared(handle: bytes, device: torch.device) -> torch.Tensor:
    """The buffer (N,) behind ``handle`` as a tensor of this process."""
    if device.type == "cuda":
        rebuild, arguments = pickle.loads(handle)
        # The sender's number of the GPU: the two processes may see different ones.
        return rebuild(*arguments[:6], device.index, *arguments[7:])
    return _map(*pickle.loads(handle))


def _map(path: str, numel: int) -> torch.Tensor:
    return torch.from_file(path, shared=True, size=numel, dtype=WIRE_DTYPE)
