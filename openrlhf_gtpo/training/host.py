"""The host of a run: its GPUs, replacements for CUDA on a host without it, and the start of Ray."""

import os
import re
import socket
import sys
from importlib import metadata
from operator import attrgetter
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import Restartable, UsageError
from openrlhf_gtpo.megatron.fp8.options import FP32_SCALES
from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.platform.gpus import too_old
from openrlhf_gtpo.training.arguments import Actor, Arguments, Critic, Ref, Reward

# Variables of workers' environments, with upstream's defaults.
_UPSTREAM_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
}

# What Megatron asks for in its deterministic mode (megatron-core 0.16.1, 0.19.2: TEDotProductAttention in
# core/extensions/transformer_engine.py, validate_args in training/arguments.py, or training/determinism.py).
_DETERMINISTIC_ENVIRONMENT = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}

# Fraction of a CPU host's memory that vLLM needs free when an engine starts (vllm 0.29.0, v1/worker/cpu_worker.py).
# Its cache has a size of its own.
CPU_MEMORY_SHARE = 0.2

_UPSTREAM_GPUS = 8  # upstream's default for each group; on a host without GPUs, processes
_UPSTREAM_TOKENS = 16192  # upstream's default of --train.max_tokens_per_gpu, for a GPU's memory
_RAY_STARTS = 10
CPU_TOKENS = 2048  # per micro-batch on Megatron, as in the quickstart


class Gpus(NamedTuple):
    """GPUs that each group of processes holds for itself: 0 without such a group, or if it uses another's.

    On a host without CUDA, Ray counts processes by these numbers.
    """

    actor: int
    reference: int
    critic: int
    reward: int
    engines: int
    other_engines: int


class EngineGroup(NamedTuple):
    """vLLM engines besides the policy's, which a feature starts.

    Fields:
        flags: beginning of their flags ``.model_name_or_path``, ``.num_engines``, ``.tensor_parallel_size`` and
            ``.gpu_memory_utilization``.
        elsewhere: what to do if they do not fit, as the end of a sentence.
    """

    flags: str
    model_name_or_path: str
    num_engines: int
    tensor_parallel_size: int
    gpu_memory_utilization: float
    elsewhere: str


def gpus_of(args: Arguments) -> Gpus:
    """Count the GPUs of a run, as ``train`` of OpenRLHF 0.11.2 places its groups.

    https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/cli/train_ppo_ray.py
    """

    def size(section: Actor | Critic | Ref | Reward) -> int:
        return section.num_nodes * section.num_gpus_per_node

    shared = args.train.colocate_all
    has_reference = args.algo.kl.init_coef > 0 and not args.ref.is_actor
    has_critic = bool(args.critic.model_name_or_path)
    has_reward = not args.reward.remote_url and bool(args.reward.model_name_or_path)
    paired = has_critic and args.train.colocate_critic_reward  # on their own GPUs, whatever others share
    with_engines = shared and not args.train.async_enable
    return Gpus(
        actor=size(args.actor),
        reference=size(args.ref) if has_reference and not (shared or args.train.colocate_actor_ref) else 0,
        critic=size(args.critic) if paired or (has_critic and not shared) else 0,
        reward=size(args.reward) if has_reward and not (paired or shared) else 0,
        engines=0 if with_engines else (args.vllm.num_engines or 0) * args.vllm.tensor_parallel_size,
        other_engines=(
            0 if shared else sum(group.num_engines * group.tensor_parallel_size for group in args.vllm.others)
        ),
    )


def without_cuda(args: Arguments) -> dict[str, Any]:
    """Return replacements, by flag, for settings that need CUDA or a node of GPUs; prints a line for each."""
    changes: dict[str, Any] = {}

    def replace(flag: str, value: object) -> None:
        print(f"No CUDA on this host: --{flag} {attrgetter(flag)(args)} becomes {value}.", file=sys.stderr)
        changes[flag] = value

    # Sizes: upstream's defaults are for eight GPUs.
    if (os.cpu_count() or 1) < _UPSTREAM_GPUS:
        processes = args.actor.num_gpus_per_node
        if args.actor.backend == "deepspeed" and processes == _UPSTREAM_GPUS:
            processes = 1
            replace("actor.num_gpus_per_node", processes)
        for name, own_gpus in zip(("ref", "critic", "reward"), gpus_of(args)[1:]):
            flag = f"{name}.num_gpus_per_node"
            if attrgetter(flag)(args) == _UPSTREAM_GPUS > processes:
                if own_gpus:
                    replace(flag, processes)
                changes[flag] = processes  # also for groups that share, which upstream compares
    if args.actor.backend == "megatron" and args.train.max_tokens_per_gpu == _UPSTREAM_TOKENS:
        replace("train.max_tokens_per_gpu", CPU_TOKENS)
    # Kernels, sleep and offload.
    if "flash_attention" in args.ds.attn_implementation:
        replace("ds.attn_implementation", "sdpa")
    if args.vllm.sync_backend == "nccl":
        changes["vllm.sync_backend"] = "gloo"
    changes["vllm.enforce_eager"] = True  # no CUDA graphs, and compiling takes longer than a short run
    if args.vllm.enable_sleep:
        replace("vllm.enable_sleep", False)
    if args.ds.enable_sleep and args.actor.backend == "deepspeed":
        replace("ds.enable_sleep", False)
    if args.ds.adam_offload:
        replace("ds.adam_offload", False)
    changes["vllm.gpu_memory_utilization"] = min(args.vllm.gpu_memory_utilization, CPU_MEMORY_SHARE)
    return changes


def without_kernels(args: Arguments) -> dict[str, Any]:
    """Return replacements, by flag, for kernels that a CUDA host lacks; prints a line. Without flash-attn, packed rows
    use torch's own kernels, and padded rows ``sdpa``."""
    on_megatron = args.actor.backend == "megatron"
    if on_megatron and not is_installed("transformer-engine"):
        print(
            "No Transformer Engine here: Megatron runs with this package's own layers. FP8 and fused "
            "layers need it (setup_env.sh --cuda --with-kernels).",
            file=sys.stderr,
        )
    if args.ds.attn_implementation != "flash_attention_2" or is_installed("flash-attn"):
        return {}
    attention = varlen_attention.NAME if args.ds.packing_samples and varlen_attention.is_available() else "sdpa"
    if not on_megatron:
        print(f"No flash-attn here: --ds.attn_implementation is {attention}.", file=sys.stderr)
    return {"ds.attn_implementation": attention}


def is_installed(package: str) -> bool:
    """True if ``package`` is really installed, not only replaced by a stand-in module."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def start_ray(args: Arguments, gpus: int) -> None:
    """Connect to the cluster at RAY_ADDRESS, or start Ray on this host; with CUDA, as OpenRLHF does, only if `ray
    start` has not.

    Args:
        gpus: number of GPUs that Ray assumes on a host without CUDA, if it starts here.

    Raises:
        UsageError: no Ray answers at RAY_ADDRESS.
        OSError: Ray cannot write its files or make its sockets here.
        Restartable: Ray did not start here in time.
    """
    import ray

    # The environment of all workers.
    defaults = _UPSTREAM_ENVIRONMENT | {FP32_SCALES: "1"}
    if args.actor.backend == "megatron":
        if args.megatron.tensor_model_parallel_size * args.megatron.context_parallel_size > 1:
            # Megatron overlaps communication with products by having kernels start in the order of their launch.
            # Blackwell no longer needs it (0.16.1, 0.19.2: training/arguments.py, validate_args).
            defaults["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
        if args.train.full_determinism_enable:
            defaults |= _DETERMINISTIC_ENVIRONMENT
    environment = {name: os.environ.get(name, value) for name, value in defaults.items()}
    # A job's environment from `ray job submit` is in os.environ too, and Ray refuses names given twice.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    options: dict[str, Any] = {"runtime_env": {"env_vars": environment}}
    if chosen := platform.chosen_platform():
        environment[platform.PLATFORM_VARIABLE] = chosen
        options["runtime_env"]["worker_process_setup_hook"] = "openrlhf_gtpo.platform.activate"
    if chosen == "cpu":
        from openrlhf_gtpo.platform import cpu

        # Phases take turns, so each process may use every core that its peers leave.
        threads = max(1, (os.cpu_count() or 1) // max(1, args.actor.num_nodes * args.actor.num_gpus_per_node))
        environment |= cpu.environment() | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
        if not os.environ.get("RAY_ADDRESS"):
            options |= {"address": "local", "num_gpus": gpus, "num_cpus": gpus + 4, "include_dashboard": False}
    # Ray gives its agents 15 s to start (launch/ray_node.py). After the first try, their imports are in the disk's
    # cache.
    for _ in range(_RAY_STARTS):
        try:
            ray.init(**options)
            return
        except ConnectionError as error:  # such as for RAY_ADDRESS=auto, which check_ray cannot try
            raise _no_ray(error) from error
        except Exception as error:
            if "timed out during startup" not in str(error):  # Ray has no type for it
                raise
    tries = f"{_RAY_STARTS} attempts of 30 s"
    raise Restartable(f"Ray did not start on this host in {tries}; check whether the host or its disk is busy.")


def check_gpus() -> None:
    """Refuse a driver or GPUs that are too old, on which a run would fail once its engines have started. On a cluster,
    ``cli.doctor`` checks the nodes."""
    if platform.chosen_platform() == "cuda" and not os.environ.get("RAY_ADDRESS"):
        import torch

        if complaint := too_old(int((torch.version.cuda or "0").partition(".")[0])):
            raise UsageError(complaint)


def check_ray() -> None:
    """Refuse a path to Python that Ray's shell would split, so that no worker would start (ray 2.55.0,
    _private/runtime_env/context.py; torch 2.13's compiler has the same bug). Also refuse a RAY_ADDRESS where nothing
    listens, because Ray would try for minutes and then abort the process (_private/node.py, Node._init_gcs_client)."""
    if re.search(r"[^\w@%+=:,./-]", sys.executable):
        raise UsageError(
            f"Ray cannot start its workers with {sys.executable}: put the environment in a folder whose path has no "
            "blanks or other special characters."
        )
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        if address.startswith("http"):
            raise ValueError("it is a dashboard; use `ray job submit` with it")
        parts = urlsplit(address if "//" in address else f"//{address}")
        if parts.port is not None:
            socket.create_connection((parts.hostname or "", parts.port), timeout=5).close()
    except (OSError, ValueError) as error:
        raise _no_ray(error) from error


def _no_ray(error: Exception) -> UsageError:
    return UsageError(
        f"No Ray cluster answers at RAY_ADDRESS={os.environ.get('RAY_ADDRESS')} ({error}); start one there, or unset "
        "RAY_ADDRESS to start Ray on this host."
    )
