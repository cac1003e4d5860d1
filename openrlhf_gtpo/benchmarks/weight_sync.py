"""Times whole weight syncs into one engine, every way in turn, beside a device copy of the same bytes.

The engine is vLLM's, or a process with a plain model where neither vLLM nor Ray is installed.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from openrlhf_gtpo import platform
from openrlhf_gtpo.integration.command_line.guard import check_openrlhf
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, numel
from openrlhf_gtpo.weight_sync.colocated import ColocatedSender
from openrlhf_gtpo.weight_sync.engine import Engine, ray_engine
from openrlhf_gtpo.weight_sync.process_engine import ProcessEngine
from openrlhf_gtpo.weight_sync.sender import WeightSender


@dataclass
class Case:
    """One way to sync, and the seconds of each repetition.

    Fields:
        bucket_mb: MiB; 0 makes every parameter a bucket of its own.
        checksum: with ``--vllm.sync_checksum``.
    """

    transport: str
    bucket_mb: int
    checksum: bool = False
    seconds: list[float] = field(default_factory=list)


def measure(
    parameters: Sequence[ParameterMeta], engine: Engine, workers: int, cases: list[Case], repeat: int
) -> list[float]:
    """Time every case ``repeat`` times, in rotating order, after a sync of each that is not counted.

    On GPUs all cases have one transport: a colocated trainer is on the engine's GPU, another on the last.

    Returns:
        Seconds of the device copy, once a repetition.
    """
    transports = {case.transport for case in cases}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        assert len(transports) == 1
        device = torch.device("cuda", 0 if "colocated" in transports else torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
    senders: dict[str, Any] = {}
    if "colocated" in transports:  # of one trainer process: what it gathers from all is its own
        senders["colocated"] = ColocatedSender([engine], lambda mine: [mine], device, 1, False)
    if "broadcast" in transports:
        senders["broadcast"] = WeightSender([engine], workers, "127.0.0.1", device, 1, False)
    weights = [torch.randn(p.shape, device=device).to(WIRE_DTYPE) for p in parameters]
    flat, copy = (torch.zeros(numel(parameters), dtype=WIRE_DTYPE, device=device) for _ in range(2))
    copies = []
    for repetition in range(repeat + 1):
        started = _now()
        copy.copy_(flat)
        copies.append(_now() - started)
        turn = repetition % len(cases)
        for case in cases[turn:] + cases[:turn]:
            sender = senders[case.transport]
            sender.bucket_bytes, sender.prove = case.bucket_mb * 2**20 or 1, case.checksum
            started = _now()
            sender.send(parameters, iter(weights))
            if repetition:
                case.seconds.append(_now() - started)
    return copies[1:]


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def parameters_of(model: Path) -> list[ParameterMeta]:
    """Names and shapes of a Hugging Face checkpoint, from the headers of its safetensors."""
    parameters = []
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        parameters += [ParameterMeta(name, tuple(h["shape"])) for name, h in header.items() if name != "__metadata__"]
    return parameters


def llama_parameters(layers: int, hidden: int, intermediate: int, vocabulary: int) -> list[ParameterMeta]:
    """Names and shapes of a Llama with a quarter as many key-value heads as attention heads."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, rows in (("q", hidden), ("k", hidden // 4), ("v", hidden // 4), ("o", hidden)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (rows, hidden)
        shapes[f"{layer}mlp.gate_proj.weight"] = shapes[f"{layer}mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{layer}input_layernorm.weight"] = shapes[f"{layer}post_attention_layernorm.weight"] = (hidden,)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return [ParameterMeta(name, shape) for name, shape in shapes.items()]


@contextmanager
def process_engine(parameters: Sequence[ParameterMeta], workers: int) -> Iterator[Engine]:
    """Workers with a plain model, on the first GPUs or on the CPU."""
    devices = [torch.device("cuda", i) if torch.cuda.is_available() else torch.device("cpu") for i in range(workers)]
    engine = ProcessEngine({p.name: p.shape for p in parameters}, devices)
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def vllm_engine(model: Path, workers: int) -> Iterator[Engine]:
    """vLLM as a run starts it, in a Ray of its own."""
    check_openrlhf()
    platform.choose()

    import ray
    from openrlhf.trainer.ray import vllm_engine as upstream

    from openrlhf_gtpo.integration import run
    from openrlhf_gtpo.integration.rollout.rollout_actor import RolloutActor

    run.start_ray(SimpleNamespace(actor=SimpleNamespace(num_nodes=1, num_gpus_per_node=1)), gpus=workers)
    try:
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * workers)
        ray.get(group.ready())
        upstream.RolloutRayActor = RolloutActor
        (actor,) = upstream.create_vllm_engines(
            num_engines=1,
            tensor_parallel_size=workers,
            pretrain=str(model),
            seed=0,
            full_determinism=False,
            enable_prefix_caching=True,
            enforce_eager=True,
            max_model_len=256,
            shared_pg=group,
            gpu_memory_utilization=0.2,
        )
        ray.get(actor.reset_prefix_cache.remote())  # it has started
        yield ray_engine(actor)
    finally:
        ray.shutdown()
