"""The GPU suite gives each benchmark flags that it knows, runs every GPU test, and its time limits add up to less than
ten minutes.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import benchmark

ROOT = Path(__file__).resolve().parents[2]
PARTS = ["lm-head", "layers", "train-step", "weight-sync"]


def suite(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks/gpu/run_all.sh"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("tiny", [[], ["--tiny"]])
def test_every_part_is_one_that_can_run(tiny: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("benchmarks.suite.command.run", asked.append)
    ended = suite("--dry-run", *tiny, str(tmp_path / "out"))
    assert ended.returncode == 0 and not ended.stderr and not (tmp_path / "out").exists()
    limits = []
    for line in ended.stdout.splitlines():
        timeout, limit, python, dash_m, module, *words = shlex.split(line)
        assert (timeout, python, dash_m) == ("timeout", sys.executable, "-m")
        limits.append(int(limit))
        if module == "pytest":
            with_marks = {path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text()}
            assert {ROOT / word for word in words if word.endswith(".py")} == with_marks - {Path(__file__)}
        else:
            assert benchmark.main(words) == 0
    assert [args.command for args in asked] == PARTS
    assert {args.output.parent for args in asked} == {tmp_path / "out"}
    assert len(limits) == len(PARTS) + 1 and sum(limits) < 600


@pytest.mark.parametrize(("memory", "smaller"), [(79, True), (140, False)])
def test_a_smaller_gpu_gets_smaller_measurements(memory: int, smaller: bool, tmp_path: Path) -> None:
    """The host's Python does nothing but print how much memory its GPU has."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || echo {memory}\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "benchmarks/gpu/run_all.sh"), str(tmp_path / "out")]
    ended = subprocess.run(command, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    parts = [json.loads(line) for line in (tmp_path / "out" / "parts.jsonl").read_text().splitlines()]
    commands = {part["part"]: part["command"] for part in parts}
    assert ("layers --shape 7b 32b --layers 1 " in commands["layers"]) == smaller
    assert ("--max-tokens 4096" in commands["train_step"]) == smaller
    assert commands["correctness"].count("_gpu.py") >= 4


def test_a_host_without_a_gpu_is_refused_in_one_sentence(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu/run_all.sh"), str(tmp_path / "out")],
        env=os.environ | {"PYTHON": "/bin/false"}, capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 2 and not (tmp_path / "out").exists()
    assert ended.stderr == "run_all: no CUDA device is visible to /bin/false; --tiny runs without one.\n"


def test_a_mistake_is_one_sentence() -> None:
    ended = suite("--quick")
    assert ended.returncode == 2
    assert ended.stderr == "run_all: unknown flag --quick; known: --dry-run --tiny.\n"
