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

pytestmark = pytest.mark.slow


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


def test_engines_that_work_and_engines_that_fail(start: Start) -> None:
    """One story, because starting processes takes most of its time."""
    engines = start(1, 1)
    for bucket_bytes in (1, 10**6, 300):  # every tensor alone, one bucket, some together
        group = join(engines, 1, bucket_bytes)
        for seed in range(3):
            sent = weights(seed)
            group.send(PARAMETERS, iter(sent))
            assert_arrived(engines, sent)

    FAKE_RAY.get(engines[1].fail_at.remote(-1))
    with pytest.raises(RuntimeError, match="cannot finish"):
        group.send(PARAMETERS, iter(weights(3)))
    FAKE_RAY.get(engines[1].fail_at.remote(None))
    sent = weights(4)
    group.send(PARAMETERS, iter(sent))
    assert_arrived(engines, sent)

    # The first bucket is on its way to an engine that takes no more: without a look at the engines, for half an hour.
    FAKE_RAY.get(engines[1].fail_at.remote(0))
    with pytest.raises(RuntimeError, match="cannot load embed"):
        group.send(PARAMETERS, iter(weights(5)))


def test_every_worker_of_an_engine_gets_every_tensor(start: Start) -> None:
    engines = start(2)
    group = join(engines, 2, 300)
    for seed in range(2):
        sent = weights(seed)
        group.send(PARAMETERS, iter(sent))
        assert_arrived(engines, sent)


def test_an_engine_that_dies_ends_the_transfer(start: Start) -> None:
    engines = start(1)
    group = join(engines, 1, 300)
    engines[0].processes[0].kill()
    with pytest.raises((RuntimeError, EOFError, OSError)):
        group.send(PARAMETERS, iter(weights(1)))
