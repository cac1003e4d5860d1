"""A preset or script is measured with all of its own flags."""

from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import benchmark
from tests.support.launcher_runs import resolved


def _asked(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments that the benchmark's own parser makes of the command."""
    asked: list[Any] = []
    monkeypatch.setattr("benchmarks.suite.command.run", asked.append)
    assert benchmark.main(words[words.index("openrlhf_gtpo.cli.benchmark") + 1 :]) == 0
    (args,) = asked
    return args


@pytest.mark.parametrize("preset", ["gtpo_32b", "gtpo_split", "dapo_colocated"])
def test_a_preset_is_measured_with_its_own_flags(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--", "--train.seed", "7"]
    own = resolved("train.sh", preset, *flags, OUTPUT="/tmp/out")
    args = _asked(resolved("benchmark_train.sh", *flags, MEASURE=preset, OUTPUT="/tmp/out"), monkeypatch)
    assert args.trainer_flags == own[own.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :]
    assert args.trainer_flags[-2:] == ["--train.seed", "7"] and not args.compare
    assert (args.steps, args.warmup, args.repeat) == (3, 1, 3)


def test_configurations_and_places_reach_the_benchmark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compare = "bf16=;fp8=--megatron.fp8 e4m3 --megatron.override 'a b=1'\n tp8=--x 8"
    variables = {"COMPARE": compare, "OUTPUT": str(tmp_path / "out"), "STEPS": "2", "REPEAT": "5", "WARMUP": "0"}
    job = resolved("benchmark_train.sh", "--submit", "http://127.0.0.1:8265", **variables)
    assert job[3:9] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"]
    args = _asked(resolved("benchmark_train.sh", **variables), monkeypatch)
    assert (args.steps, args.warmup, args.repeat) == (2, 0, 5)
    assert args.compare == ["bf16=", "fp8=--megatron.fp8 e4m3 --megatron.override 'a b=1'", "tp8=--x 8"]
    assert (args.output, args.png) == (tmp_path / "out" / "train.json", tmp_path / "out" / "train.png")
    assert args.runs.parent == tmp_path / "out" and not args.runs.parent.exists()
    assert "--data.max_samples" not in args.trainer_flags, "the benchmark ends the run, not its data"
