"""Measures whole weight syncs into one engine, with all transports in turn, relative to a device copy of the same
bytes.

The engine is vLLM, or a process with a plain model. The latter needs neither vLLM nor Ray if colocated.
"""

import argparse
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from benchmarks.suite.harness import Measured, measure, median_and_range, print_table, ratios
from benchmarks.suite.process_engine import ProcessEngine
from benchmarks.suite.results import write_results
from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.lora.merge import merge
from openrlhf_gtpo.platform.files import weight_shapes
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, TensorBuckets, numel
from openrlhf_gtpo.weight_sync.sender import ColocatedSender, Engine, WeightSender, ray_engine

COPY = "device copy"
_SYNC = "sync"


class Case(NamedTuple):
    """A measured variant of weight sync.

    Fields:
        bucket_mb: MiB; 0 gives every parameter its own bucket.
        checksum: with ``--vllm.sync_checksum``.
        lora_rank: rank of adapters that are merged into attention and MLP; 0 for none.
    """

    transport: str
    bucket_mb: int
    checksum: bool = False
    lora_rank: int = 0

    def __str__(self) -> str:
        bucket = f"{self.bucket_mb} MiB" if self.bucket_mb else "a parameter"
        merged = f", LoRA {self.lora_rank}" if self.lora_rank else ""
        return f"{self.transport}, {bucket}{', checksum' if self.checksum else ''}{merged}"


def run(args: argparse.Namespace) -> None:
    """Measure every bucket size with every transport, and print and write the results."""
    if (args.model is None) == (args.shape is None):
        raise UsageError("Expected either --model or --shape, got both." if args.model else "Give --model or --shape.")
    if args.shape is not None and args.receiver == "vllm":
        raise UsageError("--shape has no weights for vLLM to load; give --receiver process, or --model.")
    if args.shape is None:
        parameters = parameters_of(args.model)
    elif re.fullmatch(r"[1-9]\d*(x[1-9]\d*){3}", args.shape):
        parameters = llama_parameters(*map(int, args.shape.split("x")))
    else:
        raise UsageError(
            f"Expected --shape LAYERSxHIDDENxFFNxVOCABULARY, such as 32x4096x14336x128256, got {args.shape}."
        )
    if not parameters:
        raise UsageError(f"--model {args.model} has no *.safetensors.")
    _check_gpus(args)
    cases = [Case(transport, size) for transport in args.transport for size in args.bucket_mb]
    cases += [Case(transport, args.bucket_mb[-1], checksum=True) for transport in args.transport]
    if args.lora_rank:
        cases += [Case(transport, args.bucket_mb[-1], lora_rank=args.lora_rank) for transport in args.transport]
    receiver: AbstractContextManager[Engine]
    if args.receiver == "process":  # on the first GPUs, or on the CPU
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        devices = [torch.device(kind, i) if kind == "cuda" else torch.device(kind) for i in range(args.workers)]
        receiver = closing(ProcessEngine({p.name: p.shape for p in parameters}, devices))
    else:
        receiver = vllm_engine(args.model, args.workers)
    with receiver as engine:
        measured = measure_syncs(parameters, engine, args.workers, cases, args.repeat)
    seconds = {name: side.seconds[_SYNC] for name, side in measured.items()}
    size = numel(parameters) * WIRE_DTYPE.itemsize
    rows = []
    for name, times in seconds.items():
        share = statistics.median(ratios(seconds[COPY], times))
        rate = median_and_range(size / 1e9 / duration for duration in times)
        rows.append((name, f"{statistics.median(times) * 1e3:.1f}", rate, f"{share:.4f}"))
    title = f"{len(parameters)} parameters, {size / 1e9:.3f} GB; medians of {args.repeat} syncs, copy = 1"
    print_table(title, ("way", "ms", "GB/s", "of the copy"), rows)
    results = {"bytes": size, "parameters": len(parameters), "copy_seconds": seconds[COPY]}
    results["cases"] = [{**case._asdict(), "seconds": seconds[str(case)]} for case in cases]
    write_results(args.output, args, results)


def measure_syncs(
    parameters: Sequence[ParameterMeta], engine: Engine, workers: int, cases: list[Case], repeat: int
) -> dict[str, Measured]:
    """Measure the device copy and every case; results are keyed by :data:`COPY` and each case's ``str``.

    On GPUs all cases have the same transport: the trainer is on the engine's GPU if colocated, else on the last one.
    """
    transports = {case.transport for case in cases}
    device = torch.device("cpu")
    if torch.cuda.is_available():
        assert len(transports) == 1
        device = torch.device("cuda", 0 if "colocated" in transports else torch.cuda.device_count() - 1)
        torch.cuda.set_device(device)
    senders: dict[str, Any] = {}
    if "colocated" in transports:  # one trainer process gathers only from itself
        senders["colocated"] = ColocatedSender([engine], lambda value: [value], device)
    if "broadcast" in transports:
        senders["broadcast"] = WeightSender([engine], workers, "127.0.0.1", device)
    weights = [torch.randn(p.shape, device=device).to(WIRE_DTYPE) for p in parameters]
    most = max(case.lora_rank for case in cases)
    pairs = {
        p.name: (torch.randn(most, p.shape[1], device=device), torch.randn(p.shape[0], most, device=device))
        for p in parameters
        if most and "_proj.weight" in p.name
    }
    flat, copy = (torch.zeros(numel(parameters), dtype=WIRE_DTYPE, device=device) for _ in range(2))

    def tensors(case: Case) -> Iterator[torch.Tensor]:
        for parameter, weight in zip(parameters, weights, strict=True):
            pair = pairs.get(parameter.name) if case.lora_rank else None
            yield weight if pair is None else merge(weight, *pair, 2.0, parameter.name)

    def sync(case: Case) -> None:
        buckets = TensorBuckets(parameters, tensors(case), case.bucket_mb * 2**20 or 1)
        senders[case.transport].send(buckets, case.checksum)

    sides: dict[str, Any] = {COPY: partial(copy.copy_, flat)} | {str(case): partial(sync, case) for case in cases}
    return measure({name: {_SYNC: call} for name, call in sides.items()}, repeat)


def _check_gpus(args: argparse.Namespace) -> None:
    gpus = torch.cuda.device_count()
    if gpus and "broadcast" in args.transport and gpus <= args.workers:
        raise UsageError(
            f"--transport broadcast needs a GPU for the trainer besides those of {args.workers} workers, and this "
            f"host has {gpus}; give --transport colocated."
        )
    if gpus and len(args.transport) > 1:
        raise UsageError("The transports need the trainer on different GPUs; give one --transport at a time.")
    if gpus and "colocated" in args.transport and args.workers > 1:
        raise UsageError(
            f"--transport colocated has one trainer process, on one GPU; --workers {args.workers} needs more."
        )


def parameters_of(model: Path) -> list[ParameterMeta]:
    """Read names and shapes of a Hugging Face checkpoint from the headers of its safetensors.

    Raises:
        UsageError: a file is truncated.
    """
    try:
        return [ParameterMeta(name, shape) for name, shape in weight_shapes(model).items()]
    except UsageError as error:
        raise UsageError(f"--model {error}") from error


def llama_parameters(layers: int, hidden: int, intermediate: int, vocabulary: int) -> list[ParameterMeta]:
    """Make names and shapes of a Llama with a quarter as many key-value heads as attention heads."""
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
def vllm_engine(model: Path, workers: int) -> Iterator[Engine]:
    """Start a vLLM engine like a run, in its own Ray."""
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    platform.choose()

    import ray
    from openrlhf.trainer.ray import vllm_engine as upstream

    from openrlhf_gtpo.training.host import start_ray
    from openrlhf_gtpo.training.rollout.rollout_actor import StrictRolloutActor

    trainer = SimpleNamespace(backend="deepspeed", num_nodes=1, num_gpus_per_node=1)
    args: Any = SimpleNamespace(actor=trainer)
    start_ray(args, gpus=workers)
    try:
        group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * workers)
        ray.get(group.ready())
        upstream.RolloutRayActor = ray.remote(StrictRolloutActor)
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
        ray.get(actor.reset_prefix_cache.remote())  # returns once the engine has started
        yield ray_engine(actor)
    finally:
        ray.shutdown()
