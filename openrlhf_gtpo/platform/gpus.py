"""What nvidia-smi says of this node's GPUs, and whether they are too old.

Needs the standard library alone: before there is an environment, setup_env.sh runs this file with the major version of
CUDA, and it prints why no GPU here can train, if so.
"""

import os
import shutil
import subprocess
import sys
from functools import cache

OLDEST_DRIVER = {12: 525, 13: 580}  # by CUDA: NVIDIA's CUDA compatibility, "minor version compatibility"
_OLDEST_CAPABILITY = 8.0  # Ampere: vLLM, to which weights go in bfloat16, refuses it below (0.29.0, platforms/cuda.py)


@cache
def nvidia_smi(*fields: str) -> subprocess.CompletedProcess[str] | None:
    """These fields of each GPU, a line each, as ``nvidia-smi --help-query-gpu`` names them; None if there is no
    nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired as error:  # returned, as an exception would not be cached
        return subprocess.CompletedProcess(command, 1, "", str(error))


def too_old(cuda: int = 0) -> str | None:
    """Why this node's GPUs are too old, in a sentence; None if one is not, or nvidia-smi does not say.

    Args:
        cuda: the major version of CUDA that torch is built for, whose oldest driver counts too; 0 to leave that out.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):  # none of this node's is to be used
        return None
    elsewhere = "If it is for other nodes' GPUs, set CUDA_VISIBLE_DEVICES to nothing here."
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
            f"take another GPU. {elsewhere}"
        )
    return None


def _rows(*fields: str) -> list[list[str]]:
    ended = nvidia_smi(*fields)
    return [] if ended is None or ended.returncode else [row.split(", ") for row in ended.stdout.splitlines()]


if __name__ == "__main__":
    print(too_old(int(sys.argv[1])) or "", end="")
