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


# A bucket as plain data, which any transport of calls can carry: (name, shape) of its parameters.
WireBucket = list[tuple[str, tuple[int, ...]]]


def to_wire(bucket: Iterable[ParameterMeta]) -> WireBucket:
    """``bucket`` as an argument of a call."""
    return [(parameter.name, parameter.shape) for parameter in bucket]


def from_wire(bucket: WireBucket) -> list[ParameterMeta]:
    """What :func:`to_wire` was given, also after a transport that makes lists of tuples."""
    return [ParameterMeta(name, tuple(shape)) for name, shape in bucket]


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


def numel(bucket: Iterable[ParameterMeta]) -> int:
    """Elements of a bucket's buffer."""
    return sum(parameter.numel for parameter in bucket)


def pack(bucket: Sequence[ParameterMeta], tensors: Iterator[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy the next ``len(bucket)`` tensors into the beginning of the flat ``buffer``, in the wire's dtype."""
    for parameter, (_, place) in zip(bucket, unpack(bucket, buffer), strict=True):
        tensor = next(tensors)
        assert tuple(tensor.shape) == parameter.shape, f"{parameter.name}: {tuple(tensor.shape)} != {parameter.shape}"
        place.copy_(tensor)


def unpack(bucket: Sequence[ParameterMeta], buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter of ``bucket``; the tensors are views of the beginning of ``buffer``."""
    pieces = buffer[: numel(bucket)].split([p.numel for p in bucket])
    for parameter, piece in zip(bucket, pieces, strict=True):
        yield parameter.name, piece.view(parameter.shape)
