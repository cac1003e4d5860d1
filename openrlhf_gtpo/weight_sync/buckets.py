"""Cutting named tensors into buckets, and packing a bucket into one flat buffer and back."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

WIRE_DTYPE = torch.bfloat16


class ParameterMeta(NamedTuple):
    """A parameter's Hugging Face name and full shape, as for vLLM's checkpoint loader."""

    name: str
    shape: tuple[int, ...]


# Parameters sent in one buffer. Plain data: the transport of a call may turn the tuples into lists.
Bucket = Sequence[tuple[str, tuple[int, ...]]]


class Weights(Protocol):
    """A model's full tensors, in buckets, from whichever backend trains it."""

    @property
    def buckets(self) -> Sequence[Bucket]:
        """Return all buckets of the model, in the order of filling."""

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        """Write bucket ``index`` to the beginning of the flat ``buffer``, in the dtype for sending.

        Collective over the ranks that share the model.
        """


class TensorBuckets:
    """Buckets of full tensors that become available one after another, as DeepSpeed gathers them.

    Args:
        parameters: all parameters of the model.
        tensors: one full tensor of any float dtype for every entry of ``parameters``, in order.
        bucket_bytes: size of a bucket on the wire.
    """

    def __init__(
        self, parameters: Iterable[ParameterMeta], tensors: Iterator[torch.Tensor], bucket_bytes: int
    ) -> None:
        self.buckets = plan_buckets(parameters, bucket_bytes)
        self._tensors = tensors

    def fill(self, index: int, buffer: torch.Tensor) -> None:
        """See :class:`Weights`."""
        for name, place in unpack(self.buckets[index], buffer):
            tensor = next(self._tensors)
            assert tensor.shape == place.shape, f"{name}: {tuple(tensor.shape)} != {tuple(place.shape)}"
            place.copy_(tensor)


def plan_buckets(parameters: Iterable[ParameterMeta], bucket_bytes: int) -> list[list[ParameterMeta]]:
    """Cut ``parameters``, in their order, into buckets that send at most ``bucket_bytes``.

    A parameter larger than that gets a bucket of its own.
    """
    buckets: list[list[ParameterMeta]] = []
    free = 0
    for parameter in parameters:
        size = math.prod(parameter.shape) * WIRE_DTYPE.itemsize
        if not buckets or size > free:
            buckets.append([])
            free = bucket_bytes
        buckets[-1].append(parameter)
        free -= size
    return buckets


def numel(bucket: Bucket) -> int:
    """Count the elements in a bucket's buffer."""
    return sum(math.prod(shape) for _, shape in bucket)


def unpack(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of every parameter of ``bucket``; the tensors are views of the beginning of ``buffer``."""
    sizes = [math.prod(shape) for _, shape in bucket]
    for (name, shape), piece in zip(bucket, buffer[: sum(sizes)].split(sizes), strict=True):
        yield name, piece.view(tuple(shape))
