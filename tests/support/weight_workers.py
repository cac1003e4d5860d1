"""Workers for engines without vLLM that fail, cheat or report what they hold when a test asks them to."""

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from benchmarks.suite.process_engine import PlainModel, PlainWorker, ProcessEngine
from openrlhf_gtpo.weight_sync import receiver

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (40, 8),
    "layers.0.norm.weight": (8,),
    "layers.0.proj.weight": (8, 16),
    "layers.0.scale": (),
    "head.weight": (40, 8),
}
Pairs = Iterable[tuple[str, torch.Tensor]]


class Model(PlainModel):
    """Loads as told: fails or stops at a name, leaves one out, or does not report what it loaded."""

    fault: tuple[str, str] | None = None
    silent = False

    def load_weights(self, weights: Pairs) -> Any:
        loaded = super().load_weights(self._with_fault(weights))
        return None if self.silent else loaded

    def _with_fault(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        kind, name_of_fault = self.fault or ("", "")
        for name, tensor in weights:
            if name == name_of_fault and kind == "fail":
                raise RuntimeError(f"cannot load {name}")
            if name == name_of_fault and kind == "stop":
                return
            if not (name == name_of_fault and kind == "forget"):
                yield name, tensor


class Worker(PlainWorker):
    """A worker whose faults are set by calls."""

    model_class = Model
    delay = 0.0

    def set_fault(self, kind: str | None, name: str = "") -> None:
        """``corrupt`` changes one element on its way to the loader; the other kinds are the model's."""
        self.model.fault = (kind, name) if kind else None

    def set_silent(self, silent: bool) -> None:
        self.model.silent = silent

    def set_delay(self, seconds: float) -> None:
        self.delay = seconds

    def receive_bucket(self, *args: Any) -> Any:
        time.sleep(self.delay)
        return super().receive_bucket(*args)

    def forget_group(self) -> None:
        """Leave the engine without a group, like one that was restarted."""
        self.__dict__.pop("_broadcast", None)

    def set_place(self, place: str) -> None:
        receiver.memory_of = lambda device: place

    def holds(self) -> list[tuple[str, list[float], tuple[int, ...]]]:
        return [(name, w.flatten().tolist(), tuple(w.shape)) for name, w in self.model.named_parameters()]

    def version(self) -> int:
        return self.weights_version

    def _load(self, weights: Pairs, arrivals: Any) -> None:
        super()._load(self._corrupted(weights), arrivals)

    def _corrupted(self, weights: Pairs) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self.model.fault == ("corrupt", name):
                tensor = tensor.clone()
                tensor.view(-1)[-1] += 1
            yield name, tensor


def start_engine(workers: int = 1) -> ProcessEngine:
    return ProcessEngine(SHAPES, [torch.device("cpu")] * workers, Worker)


def weights(seed: int) -> list[torch.Tensor]:
    """A tensor of every shape, in float32, which the wire rounds."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def assert_arrived(engines: list[ProcessEngine], sent: list[torch.Tensor]) -> None:
    expected = [(name, t.bfloat16().flatten().tolist(), tuple(t.shape)) for name, t in zip(SHAPES, sent, strict=True)]
    for engine in engines:
        for held in engine("holds").result():
            assert sorted(held) == sorted(expected)
