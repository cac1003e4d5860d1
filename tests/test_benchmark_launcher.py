"""Would catch a launcher whose flags are lost or split when it is measured, or that is run instead."""

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.cli import benchmark, benchmark_train

SCRIPT = Path(__file__).resolve().parents[1] / "examples/scripts/benchmark_train.sh"
# As launchers print their command: quoted for a shell, a group of arguments a line.
MEASURED = r"""
[[ " $* " == *" --dry-run "* ]] || exit 7
submit=()
[[ "$1" != --submit ]] || submit=(ray job submit --address "$2" --)
shift "$(printf '%s\n' "$@" | grep -nx -- -- | head -n 1 | cut -d: -f1)"
printf '%q ' "${submit[@]}" python3 -m "${MODULE:-openrlhf_gtpo.cli.train_ppo_ray}" && echo '\'
printf '%s \\\n' "  --data.max_samples $((STEPS * 8))" "  --data.input_template $(printf %q 'Q: {} "A":')"
printf ' %q' "$@"
"""


def script(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("STEPS", "OUTPUT", "COMPARE", "MEASURE")}
    return subprocess.run(["bash", str(SCRIPT), *words], env=kept | variables, capture_output=True, text=True)


@pytest.fixture
def measured(tmp_path: Path) -> str:
    (tmp_path / "train.sh").write_text(MEASURED)
    return str(tmp_path / "train.sh")


def resolved(ended: subprocess.CompletedProcess[str]) -> list[str]:
    assert ended.returncode == 0, ended.stderr
    return shlex.split(ended.stdout.replace("\\\n", " "))


def test_the_launcher_s_flags_reach_the_benchmark(
    measured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"MEASURE": measured, "OUTPUT": str(tmp_path / "out"), "STEPS": "2", "REPEAT": "5"}
    compare = "bf16=;fp8=--megatron.fp8 e4m3 --megatron.fp8_recipe 'blockwise'\n tp8=--x 8"
    words = resolved(script("--dry-run", "--", "--train.seed", "3 4", COMPARE=compare, **variables))
    assert words[:4] == ["python3", "-m", "openrlhf_gtpo.cli.benchmark", "train"]
    asked: list[Any] = []
    monkeypatch.setattr(benchmark_train, "_run", asked.append)
    assert benchmark.main(words[3:]) == 0
    (args,) = asked
    assert (args.steps, args.warmup, args.repeat) == (2, 1, 5)
    assert args.compare == ["bf16=", "fp8=--megatron.fp8 e4m3 --megatron.fp8_recipe 'blockwise'", "tp8=--x 8"]
    assert (args.output, args.png) == (tmp_path / "out" / "train.json", tmp_path / "out" / "train.png")
    assert args.runs.parent == tmp_path / "out"
    # Three steps of eight prompts, and each word in one piece.
    expected = ["--data.max_samples", "24", "--data.input_template", 'Q: {} "A":', "--train.seed", "3 4"]
    assert args.trainer_flags == expected
    assert not (tmp_path / "out").exists()


def test_a_submitted_launcher_submits_the_benchmark(measured: str) -> None:
    words = resolved(script("--submit", "http://127.0.0.1:8265", "--dry-run", MEASURE=measured))
    start = words.index("openrlhf_gtpo.cli.benchmark")
    assert words[:start] == [*"ray job submit --address http://127.0.0.1:8265 -- python3 -m".split()]
    assert Path(words[words.index("--output") + 1]).is_absolute()


@pytest.mark.parametrize(
    ("words", "variables", "message"),
    [
        (["--steps", "3"], {}, "unknown flag --steps"),
        (["--submit"], {}, "--submit needs the address"),
        (["--dry-run"], {"REPEAT": "many"}, "REPEAT=many is not a number."),
        (["--dry-run"], {"MEASURE": "train_nothing.sh"}, "MEASURE=train_nothing.sh is no launcher; there are: "),
        (["--dry-run"], {"MODULE": "openrlhf.cli.train_ppo_ray"}, "prints no command that runs openrlhf_gtpo.cli"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], variables: dict[str, str], message: str, measured: str) -> None:
    ended = script(*words, **({"MEASURE": measured} | variables))
    assert ended.returncode == 2 and not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("benchmark_train: ") and message in line
