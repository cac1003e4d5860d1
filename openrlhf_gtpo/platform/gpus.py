"""Queries nvidia-smi about this node's GPUs, and checks whether they are too old.

Needs only the standard library. Before an environment exists, setup_env.sh runs this file with CUDA's major version.
The script then prints why no GPU here can train, if that is so.
"""

import os
import shutil
import subprocess
import sys
from functools import cache

OLDEST_DRIVER = {12: 525, 13: 580}  # by CUDA: NVIDIA's CUDA compatibility, "minor version compatibility"
_OLDEST_CAPABILITY = 8.0  # Ampere: vLLM gets bfloat16 weights and rejects older GPUs (0.29.0, platforms/cuda.py)


@cache
def nvidia_smi(*fields: str) -> subprocess.CompletedProcess[str] | None:
    """Query fields of each GPU, named as in ``nvidia-smi --help-query-gpu``, one line per GPU; None without
    nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:  # returned, because an exception would not be cached
        return subprocess.CompletedProcess(command, 1, "", str(error))


def too_old(cuda: int = 0) -> str | None:
    """Say why this node's GPUs are too old, in a sentence; None if one is new enough, or nvidia-smi does not tell.

    Args:
        cuda: the major version of CUDA that torch is built for, to check the driver too; 0 for no check.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # this node's GPUs are hidden
        return None
    elsewhere = "If this environment is for other nodes' GPUs, set CUDA_VISIBLE_DEVICES to nothing here."
    oldest = OLDEST_DRIVER.get(cuda, 0)
    for driver, name in _rows("driver_version", "name") if oldest else []:
        major = driver.partition(".")[0]
        if major.isdigit() and int(major) < oldest:
            return (
                f"{name} has driver {driver}, and CUDA {cuda} needs {oldest} or newer: update the driver. {elsewhere}"
            )
    gpus = [(float(capability), name) for capability, name in _rows("compute_cap", "name") if capability[:1].isdigit()]
    if gpus and max(gpus)[0] < _OLDEST_CAPABILITY:
        capability, name = max(gpus)
        return (
            f"{name} has compute capability {capability}, and bfloat16 needs {_OLDEST_CAPABILITY} (Ampere) or newer: "
            f"use another GPU. {elsewhere}"
        )
    return None


def _rows(*fields: str) -> list[list[str]]:
    ended = nvidia_smi(*fields)
    return [] if ended is None or ended.returncode else [row.split(", ") for row in ended.stdout.splitlines()]


if __name__ == "__main__":
    print(too_old(int(sys.argv[1])) or "", end="")
