"""Checks of the run's Ray cluster, before anything is loaded onto it."""

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # vLLM and DeepSpeed depend on it
import ray

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.megatron.parallel.layout import check_architecture
from openrlhf_gtpo.model_shape import ModelShape
from openrlhf_gtpo.platform.files import gigabytes, model_folder
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.checkpoint_disk import writes_checkpoints
from openrlhf_gtpo.training.host import EngineGroup, gpus_of

_PATIENCE = 10.0  # seconds until a network file system shows a new file to other hosts
_WEIGHT_BYTES = 2  # per parameter, in an engine
_LOOK_LIMIT = 300.0  # seconds for a node to start a process and look for a file


def check_nodes(args: Arguments) -> None:
    """Refuse a cluster with too few GPUs or CPUs, a checkpoint folder that its nodes do not share, or a model that a
    node neither has nor can fetch.

    Raises:
        UsageError: with the names of the nodes.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    check_gpus(args, nodes)
    if len(nodes) > 1 and writes_checkpoints(args):
        check_shared_folder(args.ckpt.path, nodes)
    models = {args.actor.model_name_or_path: args.actor.backend == "megatron"}
    for engines in args.vllm.others:
        models.setdefault(engines.model_name_or_path, False)
    for name, weights in models.items():
        if len(nodes) > 1 or not Path(name).is_dir():
            fetch_model(name, nodes, weights=weights)
    for engines in args.vllm.others:
        check_memory(engines, nodes)


def check_gpus(args: Arguments, nodes: list[dict[str, Any]]) -> None:
    """Refuse a cluster with fewer GPUs, or CPUs for them, than the run needs, because Ray would wait forever; and
    engines that need more GPUs than a node has, because their tensor-parallel groups would cross nodes."""
    # GPUs.
    counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    there = ", ".join(f"{_name(node)}: {count}" for node, count in zip(nodes, counts, strict=True))
    needed = gpus_of(args)
    if sum(counts) < sum(needed):
        groups = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in needed._asdict().items() if count)
        numbers = ", ".join(f"{flags}.num_engines" for flags in ["--vllm", *(e.flags for e in args.vllm.others)])
        raise UsageError(
            f"The run needs {sum(needed)} GPUs ({groups}), and the Ray cluster has {sum(counts)} ({there}); add "
            f"nodes, give --train.colocate_all, or lower {numbers} or num_nodes and num_gpus_per_node of --actor, "
            "--ref, --critic or --reward."
        )
    # A CPU for each GPU.
    cpus = [int(node["Resources"].get("CPU", 0)) for node in nodes]
    # The controller needs a free one to start, before other engines start, and then holds none.
    least = max(sum(needed), sum(needed) - needed.other_engines + 1)
    if sum(map(min, counts, cpus)) < sum(needed) or sum(cpus) < least:
        each = ", ".join(f"{_name(node)}: {cpu} for {gpu}" for node, cpu, gpu in zip(nodes, cpus, counts, strict=True))
        raise UsageError(
            f"The run needs {least} CPUs, one on the node of each of its {sum(needed)} GPUs and one to start its "
            f"controller, but the Ray cluster has {sum(cpus)} (CPUs for GPUs, {each}); start its nodes with more (ray "
            "start --num-cpus)."
        )
    # Whole engines on each node.
    size, engines = args.vllm.tensor_parallel_size, args.vllm.num_engines or 0
    fitting = [
        divisor
        for divisor in range(1, size + 1)
        if size % divisor == 0 and sum(count // divisor for count in counts) * divisor >= engines * size
    ]
    if size not in fitting and platform.chosen_platform() != "cpu":  # where nodes may share one host
        raise UsageError(
            f"--vllm.tensor_parallel_size {size} for --vllm.num_engines {engines} would cross nodes, which have "
            f"{there} GPUs; give a size that fits ({', '.join(map(str, fitting))}), and as many more engines."
        )


def fetch_model(name: str, nodes: list[dict[str, Any]], *, weights: bool) -> None:
    """Fetch the files of the model ``name`` on every node with GPUs, before waits for engines and trainer begin.

    Raises:
        UsageError: wrapped in Ray's error, from a node that neither has the model nor can fetch it.
    """
    there = [node for node in nodes if node["Resources"].get("GPU")]
    ray.get([_start_on(node, model_folder, name, weights=weights) for node in there])


def check_memory(engines: EngineGroup, nodes: list[dict[str, Any]]) -> None:
    """Refuse engines whose weights alone, by the planner's count, exceed the memory that they may use. vLLM judges
    quantized models, and models whose layers the planner does not know.

    Raises:
        UsageError: with both sizes.
    """
    config = known_config(engines.model_name_or_path)
    if config is None or getattr(config, "quantization_config", None) is not None:
        return
    weights = int(_WEIGHT_BYTES * ModelShape.of(config).parameters / engines.tensor_parallel_size)
    on_cpu = platform.chosen_platform() == "cpu"
    there = [node for node in nodes if node["Resources"].get("GPU")]
    memory = min(ray.get([_start_on(node, free_memory if on_cpu else gpu_memory) for node in there]))
    fraction = 1.0 if on_cpu else engines.gpu_memory_utilization
    if weights <= fraction * memory:
        return
    room = f"a node has {gigabytes(memory)} of memory left; give a smaller model"
    if not on_cpu:
        room = (
            f"{engines.flags}.gpu_memory_utilization {fraction:g} of a GPU's {gigabytes(memory)} is "
            f"{gigabytes(int(fraction * memory))}; give a larger {engines.flags}.tensor_parallel_size"
        )
    raise UsageError(
        f"{engines.flags}.model_name_or_path {engines.model_name_or_path} has {gigabytes(weights)} of weights for "
        f"each of its {engines.tensor_parallel_size} GPUs, but {room}, or {engines.elsewhere}."
    )


def known_config(model: str) -> Any | None:
    """Return a checkpoint's configuration; None if the planner does not know its layers, or if only the model's own
    code can read it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        check_architecture(config)
    except ValueError:  # also a LayoutError
        return None
    return config


def free_memory() -> int:
    """Return the available memory of this host, in bytes."""
    return psutil.virtual_memory().available


def gpu_memory() -> int:
    """Return the memory of this node's smallest GPU, in bytes, from the driver. Does not occupy any GPU."""
    import pynvml  # nvidia-ml-py, which vLLM for CUDA depends on

    pynvml.nvmlInit()
    gpus = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return min(pynvml.nvmlDeviceGetMemoryInfo(gpu).total for gpu in gpus)


def check_shared_folder(folder: str, nodes: list[dict[str, Any]]) -> None:
    """Refuse a folder that nodes do not share or cannot write to. Each node looks for a file of this process."""
    path = Path(folder).absolute()
    token = path / f".shared-{uuid.uuid4().hex}"
    path.mkdir(parents=True, exist_ok=True)
    token.write_text(token.name)
    try:
        answers = [(node, _start_on(node, look_for, str(token), _PATIENCE)) for node in nodes]
        for node, answer in answers:
            try:
                complaint = ray.get(answer, timeout=_LOOK_LIMIT)
            except (ray.exceptions.RayError, TimeoutError) as error:
                complaint = f"could not be checked ({one_line(error):.200})"
            if complaint:
                raise UsageError(
                    f"--ckpt.path {path} {complaint} on node {_name(node)}, but all {len(nodes)} nodes must read and "
                    "write the same folder; give a folder on a shared file system (NFS, Lustre, …)."
                )
    finally:
        token.unlink(missing_ok=True)


def _start_on(node: dict[str, Any], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call ``function`` on a node; returns Ray's reference to its answer."""
    place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=place)(function)
    return task.remote(*args, **options)


def look_for(token: str, patience: float) -> str | None:
    """Say what is wrong with the folder of ``token`` on this node; None if the file is there and others can be
    written."""
    path = Path(token)
    deadline = time.monotonic() + patience
    while not os.path.exists(path):  # also False if it may not be accessed
        if time.monotonic() > deadline:
            return "is another folder" if path.parent.is_dir() else "does not exist"
        time.sleep(0.5)
    return None if os.access(path.parent, os.W_OK) else "is not writable"


def _name(node: dict[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])
