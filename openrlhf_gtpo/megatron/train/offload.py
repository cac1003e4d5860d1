"""Moves a trainer's memory to the host and back, between the phases of a run that shares its GPUs."""

from collections.abc import Iterator

import torch
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.weights import memory_of
from openrlhf_gtpo.megatron.parallel.host import on_cuda
from openrlhf_gtpo.megatron.train.trainer import Trainer


class Offload:
    """The storages of one trainer: parameters, gradient buffers, and optimizer states with their float32 weights.

    Tensors stay what they are; only the memory behind them goes, so that every view of a buffer is valid again after
    :meth:`restore`. Gradients are not kept, since a step begins with zeros.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._on_host: dict[str, list[tuple[torch.UntypedStorage, Tensor]]] = {}
        self._gradients: list[tuple[torch.UntypedStorage, int]] = []

    def optimizer(self) -> None:
        """Release gradients, and move optimizer states; parameters remain, so that forward passes still work."""
        if "optimizer" in self._on_host:
            return
        parameters = {_address(tensor) for tensor in self._parameters()}
        self._move("optimizer", (t for t in self._optimizer_tensors() if _address(t) not in parameters))
        for buffer in self._buffers():
            storage = buffer.grad_data.untyped_storage()
            self._gradients.append((storage, storage.nbytes()))
            storage.resize_(0)

    def parameters(self) -> None:
        """Move the parameters too."""
        if "parameters" not in self._on_host:
            self._move("parameters", self._parameters())
            if self._trainer.model.fp8 is not None:
                self._trainer.model.fp8.drop_caches()

    def restore(self, optimizer: bool = True) -> None:
        """Bring parameters back, and with ``optimizer`` the rest. What is here stays."""
        for name in ("parameters", *(["optimizer"] if optimizer else [])):
            for storage, host in self._on_host.pop(name, []):
                storage.resize_(host.numel())
                _bytes(storage).copy_(host, non_blocking=True)
        if optimizer:
            for storage, size in self._gradients:
                storage.resize_(size)
                _bytes(storage).zero_()
            self._gradients.clear()
        if on_cuda():
            torch.cuda.synchronize()

    def _move(self, name: str, tensors: Iterator[Tensor]) -> None:
        moved: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in moved:
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=on_cuda())
                host.copy_(_bytes(storage))
                moved[storage.data_ptr()] = storage, host
        for storage, _ in moved.values():
            storage.resize_(0)
        self._on_host[name] = list(moved.values())
        if on_cuda():
            torch.cuda.empty_cache()

    def _buffers(self) -> list:
        return [*self._trainer.ddp.buffers, *self._trainer.ddp.expert_parallel_buffers]

    def _parameters(self) -> Iterator[Tensor]:
        for parameter in self._trainer.model.stage.parameters():
            yield from memory_of(parameter)

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        chained = getattr(self._trainer.optimizer, "chained_optimizers", [self._trainer.optimizer])
        for optimizer in (one.optimizer for one in chained if getattr(one, "optimizer", None) is not None):
            for group in optimizer.param_groups:
                yield from (parameter.data for parameter in group["params"])
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
