"""The differences between a CUDA host and a host without one.

``detect`` decides which of the two a run is for. On a CPU, ``activate`` replaces the CUDA functions that OpenRLHF
calls. On a CUDA host it only replaces flash-attn, and only if that is missing.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

__all__ = ["PLATFORM_VARIABLE", "activate", "choose", "chosen_platform", "detect"]

PLATFORM_VARIABLE = "OPENRLHF_GTPO_PLATFORM"
_PLATFORMS = ("cuda", "cpu")


def chosen_platform() -> str | None:
    """Return the platform named in the environment, or None if nobody has chosen one.

    Raises:
        ValueError: the variable holds something other than ``cuda`` or ``cpu``.
    """
    value = os.environ.get(PLATFORM_VARIABLE)
    if value is not None and value not in _PLATFORMS:
        raise ValueError(f"Expected {PLATFORM_VARIABLE} to be one of {', '.join(_PLATFORMS)}, got {value!r}.")
    return value


def detect() -> str:
    """Detect the platform of the run that this driver starts: ``"cuda"`` or ``"cpu"``.

    An explicit choice wins. Otherwise a torch without CUDA (or ROCm) means CPUs. A torch with it means GPUs, unless
    this host has no device and no Ray cluster is named. (The driver of a cluster job often runs on a head node without
    a GPU.)
    """
    chosen = chosen_platform()
    if chosen is not None:
        return chosen

    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "cpu"
    if os.environ.get("RAY_ADDRESS") or torch.cuda.device_count() > 0 or Path("/proc/driver/nvidia/gpus").exists():
        return "cuda"
    return "cpu"


def choose() -> None:
    """Choose the platform as ``detect`` does, and prepare this process and its children; a driver's first step."""
    os.environ[PLATFORM_VARIABLE] = detect()
    # Under `uv run`, Ray would start its workers with uv in a copy of the working folder, and everything they write
    # there would be lost (ray 2.55.0, _private/runtime_env/uv_runtime_env_hook.py). Ray reads this on import.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    activate()


def activate() -> None:
    """Prepare this process for the platform that the driver chose (Ray calls this in every worker process).

    The environment passes the choice on, because a Ray worker without a GPU share sees no device on any host.
    """
    chosen = chosen_platform()
    _do_without_home()
    if chosen == "cpu":
        from openrlhf_gtpo.platform import cpu

        cpu.activate()
    # OpenRLHF 0.11.2 imports it at module level (openrlhf/models/ring_attn_utils.py).
    if chosen is not None and "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        from openrlhf_gtpo.platform import flash_attn_stand_in

        flash_attn_stand_in.install()


def _do_without_home() -> None:
    """Move Triton's folder if this user's home is not writable, as in many containers. DeepSpeed makes that folder on
    import (deepspeed 0.19.6, ops/transformer/inference/triton/matmul_ext.py)."""
    from openrlhf_gtpo.platform.files import existing_parent

    if "TRITON_HOME" not in os.environ and not os.access(existing_parent(os.path.expanduser("~/.triton")), os.W_OK):
        folder = Path(tempfile.gettempdir(), f"openrlhf_gtpo-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        mine = folder.lstat().st_uid == os.getuid()  # private, because code in it is executed
        os.environ["TRITON_HOME"] = str(folder) if mine else tempfile.mkdtemp()
