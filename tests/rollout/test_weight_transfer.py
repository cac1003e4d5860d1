"""Would catch workers that end up with different weights, and an engine's failure that nobody hears of.

The processes and their gloo group are real; vLLM's model and Ray's references are stand-ins.
"""

from collections.abc import Callable, Iterator

import pytest
import torch
from weight_processes import FAKE_RAY, Engine

from openrlhf_gtpo.rollout import sender
from openrlhf_gtpo.rollout.buckets import ParameterMeta
from openrlhf_gtpo.rollout.sender import WeightSender

SHAPES = {"embed": (40, 8), "norm": (8,), "proj": (8, 16), "scalar": (), "head": (40, 8)}
PARAMETERS = [ParameterMeta(name, shape) for name, shape in SHAPES.items()]

Start = Callable[..., list[Engine]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start engines, by their numbers of workers."""
    monkeypatch.setattr(sender, "ray", FAKE_RAY)
    engines: list[Engine] = []

    def run(*sizes: int) -> list[Engine]:
        engines.extend(Engine(size) for size in sizes)
        return engines

    yield run
    for engine in engines:
        engine.kill()


def join(engines: list[Engine], size: int, bucket_bytes: int) -> WeightSender:
    return WeightSender(engines, size, "127.0.0.1", torch.device("cpu"), bucket_bytes)


def weights(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


def assert_arrived(engines: list[Engine], sent: list[torch.Tensor]) -> None:
    expected = [(name, t.bfloat16().flatten().tolist(), tuple(t.shape)) for name, t in zip(SHAPES, sent, strict=True)]
    for engine in engines:
        for arrived in FAKE_RAY.get(engine.arrived.remote()):
            assert arrived == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sizes", [(1, 1), (2,)], ids=["two engines", "one engine of two workers"])
def test_every_worker_gets_every_tensor_in_every_transfer(start: Start, sizes: tuple[int, ...]) -> None:
    engines = start(*sizes)
    for bucket_bytes in (1, 300, 10**6):  # every tensor alone, some together, one bucket
        group = join(engines, sizes[0], bucket_bytes)
        for seed in range(3):
            sent = weights(seed)
            group.send(PARAMETERS, iter(sent))
            assert_arrived(engines, sent)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fails_at", [0, 2, -1], ids=["at the first tensor", "half way", "after the last"])
def test_an_engine_that_fails_ends_the_transfer(start: Start, fails_at: int) -> None:
    engines = start(1, 1)
    group = join(engines, 1, 300)
    group.send(PARAMETERS, iter(weights(0)))
    FAKE_RAY.get(engines[1].fail_at.remote(fails_at))
    with pytest.raises(RuntimeError, match="cannot (load|finish)"):
        group.send(PARAMETERS, iter(weights(1)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_engine_that_dies_ends_the_transfer(start: Start) -> None:
    engines = start(1, 1)
    group = join(engines, 1, 300)
    engines[1].processes[0].kill()
    with pytest.raises((RuntimeError, EOFError, OSError)):
        group.send(PARAMETERS, iter(weights(1)))
