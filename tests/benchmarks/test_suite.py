"""Measurements: what the GPU suite runs needs neither OpenRLHF nor Ray, vLLM or DeepSpeed, and operations, tokens
and phases are counted by hand. ``benchmark train`` is tried by tests/e2e/test_launch_scripts.py.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.step_phases import PHASES, Setup, of_run
from benchmarks.suite.synthetic import BF16, read_shape
from benchmarks.suite.train_step import derived
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.model_shape import ModelShape, decoder_flops
from openrlhf_gtpo.report import names
from tests.startup import sitecustomize

ROOT = Path(__file__).resolve().parents[2]
# Makes a Python that has none of these packages, however it is started: only its path finder knows where they are. It
# comes before the tests' own sitecustomize on the path, and includes it.
WITHOUT = Path(sitecustomize.__file__).read_text() + """
from importlib.machinery import PathFinder
ABSENT = {"openrlhf", "ray", "vllm", "deepspeed"}
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in ABSENT else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""
COMMANDS = (
    "weight-sync --receiver process --transport colocated --shape 2x32x64x128 --bucket-mb 1 --repeat 1",
    "lm-head --shape 16x32x64 --repeat 1",
    "layers --shape tiny --tokens 128 --sequence-length 64 --micro-batches 2 --repeat 2 --matrix 64 --recipes delayed",
    "train-step --shape tiny --prompts 2 --samples 4 --prompt-tokens 8 --response-tokens 64 --max-tokens 128 "
    "--warmup 1 --repeat 2 --recipes blockwise --fp8-param",
)


@pytest.mark.slow
def test_what_the_gpu_suite_runs_needs_no_upstream(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *(p for p in sys.path if p)])}
    written = {}
    for words in COMMANDS:
        output = tmp_path / "made" / f"{words.split()[0]}.json"
        program = [sys.executable, "-m", "openrlhf_gtpo.cli.benchmark", *words.split(), "--output", str(output)]
        ended = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        written[words.split()[0]] = json.loads(output.read_text())
    assert written["lm-head"]["cases"][0]["absent"]["openrlhf"] == "not installed"
    (case,) = written["layers"]["cases"]
    assert case["flops"]["forward"] == 2 * decoder_flops(ModelShape.of(read_shape("tiny")), [64, 64])
    bf16, blockwise, primary = written["train-step"]["measured"].values()
    assert bf16["tokens"] == blockwise["tokens"] and len(set(bf16["tokens"])) == 2
    assert primary["grad_norms"] == pytest.approx(blockwise["grad_norms"], rel=1e-4)


def test_operations_by_hand() -> None:
    """Two layers: H 256, MLP 512, four heads and two groups of 64 (Q 256, K and V 128), on rows of 3 and 5 tokens."""
    a_token = 256 * (256 + 128 + 128) + 256 * 256 + 256 * 512 * 3
    scores = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)  # pairs of a token and one that it sees
    attention = scores * 64 * 4 * 2  # queries with keys, and weights with values
    assert decoder_flops(ModelShape.of(read_shape("tiny")), [3, 5]) == 2 * 2 * (8 * a_token + attention)


def test_a_step_without_advantages_is_compared_with_one_without() -> None:
    """On DeepSpeed they are computed elsewhere; in the second step it was as fast as bfloat16, in the first half."""
    bf16 = {"old_policy": [1.0, 2.0], "advantages": [7.0, 9.0], "train": [3.0, 2.0]}
    deepspeed = {"old_policy": [2.0, 2.0], "train": [6.0, 2.0]}
    found = derived({name: {"seconds": s, "tokens": [12, 8]} for name, s in ((BF16, bf16), ("deepspeed", deepspeed))})
    assert found["deepspeed"]["step"] == {"tokens_per_second": [1.5, 2], "times_bf16": [0.5, 1]}
    assert found[BF16]["step"] == {"tokens_per_second": [12 / 11, 8 / 13], "times_bf16": [1, 1]}


def test_every_phase_by_hand() -> None:
    """Two steps, the second thrice as slow: 20 s, 2 of them in no phase, for 300 prompt and 100 response tokens."""
    setup = Setup(
        gpus=4,
        busy={"rollout": 1, "old_log_probs": 3, "shaping": 0, "train": 3, "weight_sync": 4},
        passes={"rollout": 1, "old_log_probs": 2, "train": 6},
        epochs=2,
        precision=dict.fromkeys(("rollout", "old_log_probs", "train"), "bf16"),
    )
    work = {names.TOKENS_PROMPT: 300, names.TOKENS_RESPONSE: 100, names.FLOPS_FORWARD: 1e9}
    steps = []
    for step, times in ((2, 1.0), (3, 3.0)):
        seconds = dict(zip((timing for timing, _ in PHASES.values()), (4.0, 3.0, 1.0, 8.0, 2.0), strict=True))
        seconds |= {names.TIMING_STEP_WALL: 20.0, names.TIMING_STEP_TOTAL: 1.0}  # upstream's sum is not the whole step
        steps.append({"kind": "train", "step": step, **work, **{name: times * s for name, s in seconds.items()}})
    run = of_run(steps, setup)
    phases = {name: (one["seconds"], one["tokens"], one["flops"]) for name, one in run["phases"].items()}
    assert phases == {
        "rollout": (8, 100, 1e9),
        "old_log_probs": (6, 400, 2e9),
        "shaping": (2, 100, 0),
        "train": (16, 800, 6e9),
        "weight_sync": (4, 400, 0),
        "step": (40, 400, 9e9),
    }
    gpu_share = pytest.approx(1 - (8 * 1 + 6 * 3 + 16 * 3 + 4 * 4) / (40 * 4))
    assert run["idle"] == {"seconds": 4, "share": 0.1, "gpu_share": gpu_share}


def test_every_part_of_the_gpu_suite_is_one_that_can_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("benchmarks.suite.command.run", asked.append)
    command = ["bash", str(ROOT / "benchmarks/gpu/run_all.sh"), "--dry-run", str(tmp_path / "out")]
    ended = subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True)
    limits = []
    for line in ended.stdout.splitlines():
        _, limit, _, _, module, *words = shlex.split(line)
        limits.append(int(limit))
        if module == "pytest":
            with_marks = {path for path in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in path.read_text()}
            assert {ROOT / word for word in words if word.endswith(".py")} == with_marks - {Path(__file__)}
        else:
            assert benchmark.main(words) == 0
    assert [args.command for args in asked] == ["lm-head", "layers", "train-step", "weight-sync"]
    assert len(limits) == len(asked) + 1 and sum(limits) < 600
