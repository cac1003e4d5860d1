"""Lets OpenRLHF, DeepSpeed and vLLM run on a host without CUDA. Never imported on a CUDA host.

OpenRLHF 0.11.2 asks torch.cuda for its current device and synchronizes it (openrlhf/trainer/ray/ppo_actor.py of
https://github.com/OpenRLHF/OpenRLHF). Each stand-in below replaces one such call. All can go when upstream calls
``torch.accelerator`` instead.
"""

import logging
import os

_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    # vLLM pins its threads to cores that it chooses, where they would compete with the trainer's threads, as in
    # https://github.com/vllm-project/vllm/pull/27953.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    # Threads that spin while they wait for each other waste most of a small machine that several processes share: a
    # training step of a 135M-parameter model took 17 s of processor time on two busy cores, and 3 s without spinning.
    "OMP_WAIT_POLICY": "PASSIVE",
    # They still spin for a tenth of a millisecond. Waking them takes as long, which is most of the time between a
    # layer's short operations. vLLM decodes 64 rows of the same model in 114 ms instead of 165.
    "GOMP_SPINCOUNT": "2000",
    # Ray would start one idle Python worker for every logical CPU: https://github.com/ray-project/ray/pull/33623.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Silences the warning of ray.init 2.55 about a future default (https://github.com/ray-project/ray/pull/55791).
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray gives its workers low priority, so that they yield to its own processes and the user's
    # (https://github.com/ray-project/ray/pull/24928). Here the workers do all the work.
    "RAY_worker_niceness": "0",
}


class _CpuDevice(str):
    """``torch.cuda.current_device()`` of a CPU host.

    Tensors take it as the device ``"cpu"``, while ``f"cuda:{device}"`` (the replay buffer's target, which is only ever
    stored) stays a well-formed device name.
    """

    def __new__(cls) -> "_CpuDevice":
        return super().__new__(cls, "cpu")

    def __format__(self, spec: str) -> str:
        return "0"


def environment() -> dict[str, str]:
    """Environment variables of every process of a CPU run. Values set by the user win."""
    return {name: os.environ.get(name, value) for name, value in _ENVIRONMENT.items()}


def activate() -> None:
    """Make this process look like a host whose only device is the CPU. Safe to call twice."""
    os.environ.update(environment())  # before torch, which reads OMP_WAIT_POLICY on import

    # bitsandbytes, which OpenRLHF imports, warns that a package for 4-bit products is missing. No run here needs it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

    import torch

    torch.cuda.current_device = _CpuDevice  # type: ignore[assignment]
    for name in ("synchronize", "empty_cache", "set_device"):
        # A new function for each name: torch._dynamo keeps a rule for each function object and refuses shared ones
        # (https://github.com/pytorch/pytorch/pull/115059).
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
