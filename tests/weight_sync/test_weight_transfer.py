"""All workers end up with the weights that were sent, and an engine's failure is reported.

The processes and their gloo group are real; a plain model stands in for vLLM's.
"""

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from benchmarks.suite.process_engine import ProcessEngine
from openrlhf_gtpo.weight_sync import transports
from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, TensorBuckets
from openrlhf_gtpo.weight_sync.receipts import WeightSyncError
from openrlhf_gtpo.weight_sync.receiver import WeightReceiver
from openrlhf_gtpo.weight_sync.sender import WeightSender
from tests.support.weight_workers import SHAPES, assert_arrived, start_engine, weights

PARAMETERS = [ParameterMeta(name, shape) for name, shape in SHAPES.items()]

Start = Callable[..., list[ProcessEngine]]

pytestmark = pytest.mark.slow


@pytest.fixture
def start() -> Iterator[Start]:
    """Start engines with the given numbers of workers."""
    engines: list[ProcessEngine] = []

    def run(*sizes: int) -> list[ProcessEngine]:
        engines.extend(start_engine(size) for size in sizes)
        return engines

    yield run
    for engine in engines:
        engine.close()


def join(engines: list[ProcessEngine], size: int) -> WeightSender:
    return WeightSender(engines, size, "127.0.0.1", torch.device("cpu"))


def bucketed(tensors: list[torch.Tensor], bucket_bytes: int = 300) -> TensorBuckets:
    return TensorBuckets(PARAMETERS, iter(tensors), bucket_bytes)


def test_engines_that_work_and_engines_that_fail(start: Start) -> None:
    """All cases in one test, because starting processes takes most of its time."""
    engines = start(1, 1)
    for bucket_bytes in (1, 10**6, 300):  # every tensor alone, one bucket, some together
        group = join(engines, 1)
        for seed in range(3):
            sent = weights(seed)
            group.send(bucketed(sent, bucket_bytes), sync_checksum=bucket_bytes == 300)
            assert_arrived(engines, sent)

    for fault, sentence in (
        (
            ("corrupt", "layers.0.proj.weight"),
            "layers.0.proj.weight reached worker 0 of vLLM engine 1 with other values",
        ),
        (("stop", "head.weight"), "head.weight was not loaded completely by worker 0 of vLLM engine 1"),
        (("stop", "layers.0.scale"), "head.weight was sent, but never reached worker 0 of vLLM engine 1"),
        (
            ("forget", "layers.0.scale"),
            "layers.0.scale was not loaded completely by worker 0 of vLLM engine 1",
        ),
    ):
        engines[1]("set_fault", *fault).result()
        with pytest.raises(WeightSyncError, match=sentence):
            group.send(bucketed(weights(3)), sync_checksum=True)
    engines[1]("set_fault", None).result()
    sent = weights(4)
    group.send(bucketed(sent), sync_checksum=True)
    assert_arrived(engines, sent)

    # The first bucket goes to an engine that takes no more; a sender that ignored the engines would wait half an hour.
    engines[1]("set_fault", "fail", "embed.weight").result()
    with pytest.raises(RuntimeError, match="cannot load embed.weight"):
        group.send(bucketed(weights(5)), sync_checksum=True)


def test_every_worker_gets_every_tensor_and_its_death_ends_the_transfer(start: Start) -> None:
    engines = start(2)
    group = join(engines, 2)
    for seed in range(2):
        sent = weights(seed)
        group.send(bucketed(sent))
        assert_arrived(engines, sent)
    engines[0].processes[0].kill()
    with pytest.raises((RuntimeError, EOFError, OSError)):
        group.send(bucketed(weights(2)))
    with pytest.raises((RuntimeError, EOFError, OSError)):
        join(engines, 2)  # which would otherwise wait half an hour for the others


@pytest.mark.parametrize(
    ("layer", "tied", "said"),
    [
        ("Llama3RotaryEmbedding", False, False),
        ("ParallelLMHead", True, False),
        ("ParallelLMHead", False, True),
        ("QKVParallelLinear", True, True),
    ],
)
def test_vllm_warns_of_layers_that_should_have_got_weights_alone(layer: str, tied: bool, said: bool) -> None:
    worker = WeightReceiver()
    config = SimpleNamespace(tie_word_embeddings=tied)
    worker.model_runner = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    record = logging.LogRecord("vllm", logging.WARNING, "", 1, "%s: Failed to load weights", (layer,), None)
    assert worker._is_news(record) == said


def test_an_nccl_that_is_switched_off_is_not_taken_for_one_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl

    monkeypatch.setattr(utils.StatelessProcessGroup, "create", lambda **options: None)
    monkeypatch.setattr(pynccl, "PyNcclCommunicator", lambda meeting, device: SimpleNamespace(disabled=True))
    with pytest.raises(WeightSyncError, match="^vLLM's NCCL is off: unset VLLM_DISABLE_PYNCCL"):
        transports.join("127.0.0.1", 1, 0, 2, torch.device("cuda:0"))
