"""Moves the memory of a trainer or a model to the host and back, between phases of a run that share its GPUs."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.weights import memory_of
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import HostMemory, on_cuda
from openrlhf_gtpo.megatron.train.trainer import Trainer


class Offload:
    """The storages of one trainer (parameters, gradient buffers, optimizer states with their float32 weights), or only
    the parameters of a model.

    Tensors stay as they are. Only the memory behind them is freed for other processes, so every view of a buffer is
    valid again after :meth:`restore`. Gradients are dropped, because a step begins with zeros.

    Host memory is pinned and reused: 2 bytes per bfloat16 parameter of this rank, and 12 (float32 weight, AdamW's two
    moments) per parameter with states here. The distributed optimizer shards the states over DP × CP.
    """

    def __init__(self, target: Trainer | LoadedModel) -> None:
        self._trainer: Any = target if isinstance(target, Trainer) else None
        self._model = target.model if isinstance(target, Trainer) else target
        self._host: dict[str, HostMemory] = defaultdict(HostMemory)
        self._moved: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}

    def gradients(self) -> None:
        """Release only the gradients, which neither loading nor saving needs."""
        self._trainer.ddp.offload_grad_buffers()

    def optimizer(self) -> None:
        """Release gradients, and move optimizer states. Parameters remain, so forward passes still work."""
        if "optimizer" not in self._moved:
            parameters = {_address(tensor) for tensor in self._parameters()}
            self._move("optimizer", (t for t in self._optimizer_tensors() if _address(t) not in parameters))
        self.gradients()

    def parameters(self) -> None:
        """Move the parameters too."""
        if "parameters" not in self._moved:
            self._move("parameters", self._parameters())
            if self._model.fp8 is not None:
                self._model.fp8.drop_caches()
        torch.cuda.empty_cache()

    def restore(self, *, optimizer: bool = True, gradients: bool = True) -> None:
        """Restore parameters, with ``optimizer`` also its states, and with both flags also gradients."""
        for name in ("parameters", *(["optimizer"] if optimizer else [])):
            for storage, host in self._moved.pop(name, []):
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
        if optimizer and gradients and self._trainer is not None:
            self._trainer.ddp.restore_grad_buffers()
        if on_cuda():
            torch.cuda.synchronize()

    def _move(self, name: str, tensors: Iterator[Tensor]) -> None:
        """Free the memory of ``tensors`` once it is copied; only ``empty_cache`` gives it to other processes."""
        storages = {s.data_ptr(): s for s in (tensor.untyped_storage() for tensor in tensors) if s.nbytes()}
        sizes = [storage.nbytes() for storage in storages.values()]
        host = self._host[name].buffer(sum(sizes))  # the first step creates the moments
        self._moved[name] = list(zip(storages.values(), host.split(sizes), strict=True))
        for storage, host in self._moved[name]:
            host.copy_(_bytes(storage))
            storage.resize_(0)

    def _parameters(self) -> Iterator[Tensor]:
        for parameter in self._model.stage.parameters():
            yield from memory_of(parameter)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        chained = self._trainer.optimizer.chained_optimizers
        for optimizer in (part.optimizer for part in chained if part.optimizer is not None):
            for group in optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
