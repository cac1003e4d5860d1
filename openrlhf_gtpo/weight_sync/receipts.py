"""Proof that a sync reached an engine: each parameter's checksum, and a check that the whole model was written."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from openrlhf_gtpo.weight_sync.buckets import Bucket, unpack

# Bits of a bfloat16 NaN that arithmetic never produces: an element with these bits was not written.
_MARK = 0x7FA5

_CHUNK = 2**20  # elements widened to 64 bits at a time
# Odd multipliers with well-mixed bits, as signed 64-bit integers: the golden ratio's and one of splitmix64's.
_SPREAD, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64

# A worker's answer, as plain data: checksums by name of everything its loader took, and the parameters not written.
Receipt = tuple[dict[str, int], list[str]]


class WeightSyncError(RuntimeError):
    """An engine did not receive the weights that were sent."""


class Arrivals:
    """Records what one worker's loader reads and writes in one sync.

    Every bfloat16 parameter of ``model`` is filled with a mark first. A parameter with a mark at the end was not
    written completely. On CPU vLLM packs weights, which hides them from marks. There, the names returned by its loader
    and the layers left unfinished by its reload show what is missing.
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
        """Yield ``weights``, and record the checksum of each one."""
        for name, tensor in weights:
            self._checksums[name] = checksum(tensor)
            yield name, tensor

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Record the names that the model's ``load_weights`` returns in this context, whoever calls it."""
        load_weights = self._model.load_weights

        def noting(*args: Any, **kwargs: Any) -> set[str] | None:
            loaded = load_weights(*args, **kwargs)
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | set(loaded)
            # On CPU vLLM's reload keeps a layer on the meta device until all its elements have arrived (vllm 0.29.0,
            # model_executor/model_loader/reload/layerwise.py, make_online_process_loader). An embedding's padding
            # never arrives, but an embedding has only one tensor.
            self._unfinished = {
                f"{prefix}.{leaf}"
                for prefix, module in self._model.named_modules()
                if not hasattr(module, "num_embeddings_padded")
                for leaf, parameter in module.named_parameters(recurse=False)
                if parameter.is_meta
            }
            return loaded

        self._model.load_weights = noting
        try:
            yield
        finally:
            del self._model.load_weights

    def receipt(self) -> Receipt:
        """Return what was received, and the parameters that were not loaded completely."""
        parameters = dict(self._model.named_parameters())
        names = self._loaded
        if names is not None:
            # Loaders return the old names of experts (vllm 0.29.0, model_executor/model_loader/weight_utils.py,
            # maybe_remap_moe_expert_param_name).
            names = names | {name.replace(".experts.", ".experts.routed_experts.") for name in names}
        # Compare by memory: W_UV and W_UK_T of vLLM's MLA are views of its kv_b_proj (vllm 0.29.0, mla_attention.py).
        loaded = {_memory(parameter) for name, parameter in parameters.items() if names is None or name in names}
        unwritten = [
            name
            for name, parameter in parameters.items()
            if _memory(parameter) not in loaded
            or name in self._unfinished
            or (parameter.dtype == torch.bfloat16 and bool((parameter.data.view(torch.int16) == _MARK).any()))
        ]
        return as_integers(self._checksums), unwritten


def _memory(parameter: torch.Tensor) -> int:
    return parameter.untyped_storage().data_ptr() or id(parameter)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Compute Σ bits_i · key_i mod 2^64 of a contiguous tensor of 16-bit elements, as an int64 scalar on its device.

    It changes if elements are changed, swapped, shifted or lost, because each position has its own key. Integer
    arithmetic is exact, so all devices agree.
    """
    bits = tensor.detach().view(-1).view(torch.int16)
    keys = torch.arange(1, min(_CHUNK, bits.numel()) + 1, device=bits.device) * _SPREAD
    keys ^= keys >> 31
    keys *= _MIX
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        total += (chunk * keys[: len(chunk)]).sum() * (2 * number + 1)
    return total


def checksums(bucket: Bucket, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Compute the checksums of a packed bucket by name, still on its device."""
    return {name: checksum(tensor) for name, tensor in unpack(bucket, buffer)}


def as_integers(sums: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Convert the checksums to Python integers, with one copy from the device."""
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)) if sums else {}


def check_receipts(sent: Mapping[str, torch.Tensor], receipts: Sequence[Sequence[Receipt]]) -> None:
    """Compare the sent tensors' checksums with the reports of every worker of every engine.

    Raises:
        WeightSyncError: a parameter arrived with other values, or was not loaded; names the first and its engine.
    """
    sums = as_integers(sent)
    for engine, workers in enumerate(receipts):
        for worker, (arrived, unwritten) in enumerate(workers):
            where = f"worker {worker} of vLLM engine {engine}"
            for name, expected in sums.items():
                if name not in arrived:
                    raise WeightSyncError(f"Weight sync: {name} was sent, but never reached {where}.")
                if arrived[name] != expected:
                    raise WeightSyncError(f"Weight sync: {name} reached {where} with other values than were sent.")
            if unwritten:
                raise WeightSyncError(
                    f"Weight sync: {unwritten[0]} was not loaded completely by {where} ({len(unwritten)} such "
                    "parameters)."
                )
