"""Which platform a run is for. Decided once, by the driver, and handed to every process in the environment."""

import os
from pathlib import Path

PLATFORM_VARIABLE = "OPENRLHF_GTPO_PLATFORM"
_PLATFORMS = ("cuda", "cpu")


def chosen_platform() -> str | None:
    """The platform named in the environment, or None where nobody has chosen one.

    Raises:
        ValueError: the variable holds something else than ``cuda`` or ``cpu``.
    """
    value = os.environ.get(PLATFORM_VARIABLE)
    if value is not None and value not in _PLATFORMS:
        raise ValueError(f"{PLATFORM_VARIABLE}={value!r} is not a platform; set it to one of {', '.join(_PLATFORMS)}.")
    return value


def detect() -> str:
    """``"cuda"`` or ``"cpu"``: what the run that this driver starts is for.

    An explicit choice wins. Otherwise a torch without CUDA (or ROCm) cannot serve GPUs anywhere, and a torch with it
    means GPUs unless this host has no device and no Ray cluster is named: the driver of a cluster job often runs on a
    head node without one.
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
