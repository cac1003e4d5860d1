"""An engine without vLLM or Ray, to measure and test only the transfer: processes that load a plain model by name."""

import multiprocessing
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE
from openrlhf_gtpo.weight_sync.receiver import WeightReceiver

Shapes = Mapping[str, tuple[int, ...]]


class PlainModel(torch.nn.Module):
    """A model that only has parameters of the given names and shapes."""

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, leaf = name.split(".")
            owner: torch.nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            weight = torch.zeros(shape, dtype=WIRE_DTYPE, device=device)
            owner.register_parameter(leaf, torch.nn.Parameter(weight, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy every tensor into the parameter of its name; return the names."""
        parameters = dict(self.named_parameters())
        loaded = set()
        for name, tensor in weights:
            parameters[name].copy_(tensor)
            loaded.add(name)
        return loaded


class PlainWorker(WeightReceiver):
    """One process of a :class:`ProcessEngine`; it holds a ``model_class`` made from the engine's shapes."""

    model_class = PlainModel

    def __init__(self, rank: int, shapes: Shapes, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        self.model = self.model_class(shapes, device)
        self.model_runner = SimpleNamespace(
            get_model=lambda: self.model,
            reload_weights=lambda weights_iterator: self.model.load_weights(weights_iterator),
        )


class ProcessEngine:
    """An engine of ``len(devices)`` workers. Calls run one after another, each on all workers. :meth:`close` ends it.

    Args:
        shapes: name to full shape of the model's parameters.
        devices: each worker's device.
        worker: class that each process creates with its rank, the shapes and its device.
    """

    def __init__(self, shapes: Shapes, devices: list[torch.device], worker: type[PlainWorker] = PlainWorker) -> None:
        context = multiprocessing.get_context("spawn")
        self._calls = ThreadPoolExecutor(1)
        self._pipes: list[Any] = []
        self.processes: list[Any] = []
        for rank, device in enumerate(devices):
            near_end, far_end = context.Pipe()
            process = context.Process(target=_serve, args=(far_end, worker, rank, dict(shapes), device), daemon=True)
            process.start()
            far_end.close()
            self._pipes.append(near_end)
            self.processes.append(process)

    def __call__(self, method: str, *args: Any) -> "Future[list[Any]]":
        return self._calls.submit(self._call, method, args)

    def _call(self, method: str, args: tuple) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((method, args))
        answers = [pipe.recv() for pipe in self._pipes]
        for _, error in answers:
            if error is not None:
                raise RuntimeError(error)
        return [result for result, _ in answers]

    def close(self) -> None:
        """End the processes at once."""
        for process in self.processes:
            process.kill()
            process.join()
        self._calls.shutdown(wait=False, cancel_futures=True)


def _serve(pipe: Any, worker: type[PlainWorker], rank: int, shapes: Shapes, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    receiver = worker(rank, shapes, device)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((getattr(receiver, method)(*args), None))
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {error}"))
