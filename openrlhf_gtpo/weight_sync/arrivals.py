"""Proof that a sync reached an engine: of each parameter a checksum, and of the engine's model that all was written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, unpack
from openrlhf_gtpo.weight_sync.checksum import checksum

# Bits of a bfloat16 NaN that no arithmetic gives: what holds it was not written.
_MARK = 0x7FA5

# What a worker answers, as plain data: name to checksum of all that its loader took, and what was not written.
Receipt = tuple[dict[str, int], list[str]]


class WeightSyncError(RuntimeError):
    """An engine did not get the weights that were sent."""


class Arrivals:
    """What one worker's loader takes and writes in one sync.

    Every parameter of ``model`` is marked at first, and what still holds a mark at the end was not, or not all, written. On
    CPU vLLM hides packed weights from marks; there the names that its loader returns tell, and the layers that its reload
    leaves unfinished.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._checksums: dict[str, torch.Tensor] = {}
        self._loaded: set[str] | None = set()
        self._unfinished: set[str] = set()
        for parameter in model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data.view(torch.int16).fill_(_MARK)

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """``weights``, noting what is taken from them."""
        for name, tensor in weights:
            self._checksums[name] = checksum(tensor)
            yield name, tensor

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Note the names that the model's ``load_weights`` returns meanwhile, whoever calls it."""
        load_weights = self._model.load_weights

        def noting(*args: Any, **kwargs: Any) -> set[str] | None:
            loaded = load_weights(*args, **kwargs)
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | set(loaded)
            self._unfinished = set(self._waiting_for_more())
            return loaded

        self._model.load_weights = noting
        try:
            yield
        finally:
            del self._model.load_weights

    def receipt(self) -> Receipt:
        """What was taken, and the parameters that nothing, or not all, was loaded into."""
        unwritten = [
            name
            for name, parameter in self._model.named_parameters()
            if (self._loaded is not None and name not in self._loaded)
            or name in self._unfinished
            or (parameter.dtype == torch.bfloat16 and bool((parameter.data.view(torch.int16) == _MARK).any()))
        ]
        return as_integers(self._checksums), unwritten

    def _waiting_for_more(self) -> Iterator[str]:
        """Parameters of layers that vLLM's reload keeps on the meta device until all of their elements have come."""
        for prefix, module in self._model.named_modules():
            if hasattr(module, "num_embeddings_padded"):  # padding never comes; such a layer has one tensor anyway
                continue
            for leaf, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    yield f"{prefix}.{leaf}"


def checksums(bucket: Sequence[ParameterMeta], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Name to checksum of a packed bucket, still on its device."""
    return {name: checksum(tensor) for name, tensor in unpack(bucket, buffer)}


def as_integers(found: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Checksums off the device, in one copy."""
    return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True)) if found else {}


def check_receipts(sent: Mapping[str, int], receipts: Sequence[Sequence[Receipt]]) -> None:
    """Compare what was sent with what every worker of every engine says.

    Raises:
        WeightSyncError: the first parameter that did not arrive as it was sent, or was not loaded, with its engine.
    """
    for engine, workers in enumerate(receipts):
        for worker, (arrived, unwritten) in enumerate(workers):
            where = f"worker {worker} of vLLM engine {engine}"
            for name, expected in sent.items():
                if name not in arrived:
                    raise WeightSyncError(f"Weight sync: {name} was sent, but never reached {where}.")
                if arrived[name] != expected:
                    raise WeightSyncError(f"Weight sync: {name} reached {where} with other values than were sent.")
            if unwritten:
                raise WeightSyncError(
                    f"Weight sync: nothing, or not all, was loaded into {unwritten[0]} of {where} "
                    f"({len(unwritten)} such parameters)."
                )
