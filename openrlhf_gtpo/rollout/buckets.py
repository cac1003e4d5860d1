"""How a list of named tensors is cut into buckets, and how one bucket becomes one flat buffer and back."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

WIRE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class ParameterMeta:
    """A parameter as vLLM's checkpoint loader knows it: its Hugging Face name and full shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def plan_buckets(parameters: Iterable[ParameterMeta], bucket_bytes: int) -> list[list[ParameterMeta]]:
    """Cut ``parameters``, in their order, into buckets of at most ``bucket_bytes`` on the wire.

    A parameter larger than that gets a bucket of its own.

    Raises:
        ValueError: ``bucket_bytes`` is not positive.
    """
    if bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes must be positive, got {bucket_bytes}.")
    buckets: list[list[ParameterMeta]] = []
    free = 0
    for parameter in parameters:
        size = parameter.numel * WIRE_DTYPE.itemsize
        if not buckets or size > free:
            buckets.append([])
            free = bucket_bytes
        buckets[-1].append(parameter)
        free -= size
    return buckets


def pack(bucket: Sequence[ParameterMeta], tensors: Iterator[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The next ``len(bucket)`` tensors, converted to the wire's dtype, in one flat buffer (N,)."""
    buffer = torch.empty(sum(p.numel for p in bucket), dtype=WIRE_DTYPE, device=device)
    offset = 0
    for parameter in bucket:
        tensor = next(tensors)
        assert tuple(tensor.shape) == parameter.shape, f"{parameter.name}: {tuple(tensor.shape)} != {parameter.shape}"
        buffer[offset : offset + parameter.numel].view(parameter.shape).copy_(tensor)
        offset += parameter.numel
    return buffer


def unpack(bucket: Sequence[ParameterMeta], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of ``bucket``; the tensors are views of ``buffer`` (N,)."""
    pieces = buffer.split([p.numel for p in bucket])
    for parameter, piece in zip(bucket, pieces, strict=True):
        yield parameter.name, piece.view(parameter.shape)
