"""A preset or script is measured with all of its own flags."""

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
