"""vLLM workers without vLLM: processes that receive weights for real, and handles to them that look like Ray's."""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf_gtpo.rollout.receiver import WeightReceiver


class _Runner:
    """Takes whole models, as vLLM's model runner does on CPU; fails on request at the n-th tensor."""

    def __init__(self) -> None:
        self.arrived: list[tuple[str, torch.Tensor]] = []
        self.fails_at: int | None = None

    def get_model(self) -> torch.nn.Module:
        return torch.nn.Module()

    def reload_weights(self, weights_iterator: Any) -> None:
        self.arrived = []
        for i, (name, tensor) in enumerate(weights_iterator):
            if i == self.fails_at:
                raise RuntimeError(f"cannot load {name}")
            self.arrived.append((name, tensor.clone()))
        if self.fails_at == -1:
            raise RuntimeError("cannot finish")


class Worker(WeightReceiver):
    """One worker of an engine."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.model_runner = _Runner()

    def fail_at(self, tensor: int | None) -> None:
        self.model_runner.fails_at = tensor

    def arrived(self) -> list[tuple[str, list[float], tuple[int, ...]]]:
        return [(name, tensor.flatten().tolist(), tuple(tensor.shape)) for name, tensor in self.model_runner.arrived]


def serve(rank: int, pipe: Any) -> None:
    """Answer (method, arguments) with (result, error) until the pipe closes. ``rank`` is the rank in the engine."""
    torch.set_num_threads(1)
    torch.distributed.get_rank = lambda *group: rank
    worker = Worker()
    while True:
        method, arguments = pipe.recv()
        try:
            pipe.send((getattr(worker, method)(*arguments), None))
        except Exception as error:
            pipe.send((None, repr(error)))


class Engine:
    """Handle to an engine of ``size`` workers: ``engine.method.remote(...)`` runs the method on all of them."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = ThreadPoolExecutor(1)
        self.pipes, self.processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: self.pool.submit(self._call, method, arguments))

    def _call(self, method: str, arguments: Sequence[Any]) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((method, arguments))
        results = [pipe.recv() for pipe in self.pipes]
        for _, error in results:
            if error:
                raise RuntimeError(error)
        return [result for result, _ in results]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.pool.shutdown(wait=False)


def _get(futures: Any) -> Any:
    return futures.result(200) if isinstance(futures, Future) else [future.result(200) for future in futures]


def _wait(futures: list[Future], num_returns: int = 1, timeout: float | None = None) -> tuple[list, list]:
    done = list(wait(futures, timeout=timeout or 0).done)[:num_returns]
    return done, [future for future in futures if future not in done]


# What the sender uses of Ray.
FAKE_RAY = SimpleNamespace(get=_get, wait=_wait)
