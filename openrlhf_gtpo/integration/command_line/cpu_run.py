"""What a run's arguments become on a host without CUDA, and the Ray resources that stand for its GPUs."""

import os
import sys
from types import SimpleNamespace


def adapt(args: SimpleNamespace) -> None:
    """Replace what only CUDA can do by what a CPU can, saying so in one line each."""

    def replace(section: SimpleNamespace, flag: str, name: str, value: object) -> None:
        print(f"No CUDA on this host: {flag} {getattr(section, name)} becomes {value}.", file=sys.stderr)
        setattr(section, name, value)

    if "flash_attention" in args.ds.attn_implementation:
        replace(args.ds, "--ds.attn_implementation", "attn_implementation", "sdpa")
    if args.vllm.sync_backend == "nccl":
        args.vllm.sync_backend = "gloo"
    if not args.vllm.enforce_eager:  # CUDA graphs do not exist here, and compiling takes longer than a short run
        args.vllm.enforce_eager = True
    if args.vllm.enable_sleep:
        replace(args.vllm, "--vllm.enable_sleep", "enable_sleep", False)
    if args.ds.enable_sleep and args.actor.backend == "deepspeed":
        replace(args.ds, "--ds.enable_sleep", "enable_sleep", False)
    if args.ds.adam_offload:
        replace(args.ds, "--ds.adam_offload", "adam_offload", False)
    # On CPU this is a share of the host's memory that vLLM wants free at start; its cache has a size of its own.
    args.vllm.gpu_memory_utilization = min(args.vllm.gpu_memory_utilization, 0.2)


def logical_gpus(args: SimpleNamespace) -> int:
    """GPUs that the placement groups of this run ask Ray for; on a CPU host they are only counted."""
    actors = [args.actor]
    actors += [args.ref] if args.algo.kl.init_coef > 0 else []
    actors += [args.reward] if not args.reward.remote_url else []
    actors += [args.critic] if args.critic.model_name_or_path else []
    models = sum(section.num_nodes * section.num_gpus_per_node for section in actors)
    return models + (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size


def ray_options(gpus: int) -> dict:
    """Arguments of ``ray.init`` for a Ray of this host's own; none where the user names a running cluster."""
    if os.environ.get("RAY_ADDRESS"):
        return {}
    return {"address": "local", "num_gpus": gpus, "num_cpus": gpus + 4, "include_dashboard": False}


def environment(args: SimpleNamespace) -> dict[str, str]:
    """Threads for each worker process: phases take turns, so each may use every core that its peers leave."""
    peers = max(1, args.actor.num_nodes * args.actor.num_gpus_per_node)
    threads = max(1, (os.cpu_count() or 1) // peers)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
