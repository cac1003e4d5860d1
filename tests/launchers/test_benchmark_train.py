"""A preset or script is measured with all of its own flags."""

from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import benchmark
from tests.support.launcher_runs import SCRIPTS, resolved, run_script


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


@pytest.mark.parametrize("measured", ["planned.sh", "train_gtpo_split.sh"])
def test_a_script_is_measured_too(measured: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A script that sources train.sh, as the planner's do, and the name of a launcher from version 0.1."""
    (tmp_path / "planned.sh").write_text(f'source {SCRIPTS}/train.sh gtpo_split "$@"\n')
    script = str(tmp_path / measured) if (tmp_path / measured).exists() else measured
    own = resolved("train.sh", "gtpo_split", OUTPUT="/tmp/out")
    args = _asked(resolved("benchmark_train.sh", MEASURE=script, OUTPUT="/tmp/out"), monkeypatch)
    assert args.trainer_flags == own[own.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :]


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


def test_a_run_without_a_gpu_has_data_for_all_of_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    args = _asked(resolved("benchmark_train.sh", "--cpu", STEPS="2", WARMUP="3", MEASURE="gtpo_split"), monkeypatch)
    flags = args.trainer_flags
    samples, prompts = (int(flags[flags.index(f) + 1]) for f in ("--data.max_samples", "--rollout.batch_size"))
    assert samples == 5 * prompts


@pytest.mark.parametrize(
    ("flags", "environment", "message"),
    [
        (["--steps", "3"], {}, "unknown flag --steps"),
        (["--submit"], {}, "--submit needs the address"),
        ([], {"REPEAT": "many"}, "REPEAT is 'many'; it must be a number."),
        ([], {"MEASURE": "train_nothing.sh"}, "MEASURE is 'train_nothing.sh'; it must be a preset or a script: dapo_"),
        ([], {"TENSOR_PARALLEL": "two"}, "TENSOR_PARALLEL is 'two'; it must be a number from 1 to 999999999."),
    ],
)
def test_a_mistake_is_one_sentence(flags: list[str], environment: dict[str, str], message: str) -> None:
    done = run_script("benchmark_train.sh", *flags, **environment)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("benchmark_train: ") and message in done.stderr and done.stderr.count("\n") == 1


def test_help_is_the_header() -> None:
    done = run_script("benchmark_train.sh", "--help")
    assert done.returncode == 0 and "COMPARE=" in done.stdout and "set -e" not in done.stdout
