"""Catches a buffer that is read before it is filled, overwritten before it is read, or kept after the sync, where the
trainer's process and an engine's share the memory of a CUDA device.
"""

import pytest
import torch

from benchmarks.suite.process_engine import ProcessEngine
from openrlhf_gtpo.weight_sync.buckets import ParameterMeta, TensorBuckets
from openrlhf_gtpo.weight_sync.sender import ColocatedSender
from tests.support.weight_workers import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: CUDA IPC has no stand-in"),
]
SHAPES = {f"layers.{i}.weight": (4096, 1024 + 8 * i) for i in range(24)}


def test_an_engine_on_the_same_gpu_gets_every_sync():
    device = torch.device("cuda", torch.cuda.current_device())
    engine = ProcessEngine(SHAPES, [device], Worker)
    try:
        parameters = [ParameterMeta(name, shape) for name, shape in SHAPES.items()]
        sender = ColocatedSender([engine], lambda mine: [mine], device)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for seed, bucket_bytes in enumerate([1, 20 * 2**20, 20 * 2**20, 2**30]):
            generator = torch.Generator(device).manual_seed(seed)
            # Made lazily, so that the device is still filling one buffer while the engine loads the other.
            tensors = (torch.randn(shape, generator=generator, device=device) for shape in SHAPES.values())
            sender.send(TensorBuckets(parameters, tensors, bucket_bytes), True)
            del tensors
            assert torch.cuda.memory_allocated() == before, "the engine or the trainer keeps the buffers"
        engine("set_fault", "corrupt", "layers.7.weight").result()
        tensors = (torch.randn(shape, device=device) for shape in SHAPES.values())
        with pytest.raises(RuntimeError, match="layers.7.weight reached worker 0 of vLLM engine 0 with other values"):
            sender.send(TensorBuckets(parameters, tensors, 20 * 2**20), True)
    finally:
        engine.close()
