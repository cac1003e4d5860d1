"""The README's command as written: would catch a launcher whose flags, files or reports do not fit together."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from openrlhf_gtpo.report import names
from tests.e2e.conftest import ROOT

SCRIPT = ROOT / "examples" / "scripts" / "quickstart.sh"


@pytest.mark.e2e
@pytest.mark.slow
def test_smoke_run_ends_with_a_table_and_curves(tmp_path: Path) -> None:
    output = tmp_path / "run"
    started = time.monotonic()
    ended = subprocess.run(
        ["bash", str(SCRIPT), "--smoke", "--output", str(output)], capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert time.monotonic() - started < 240
    assert "products" in ended.stdout and "curves.png" in ended.stdout
    assert "step 3/3" in ended.stderr  # progress, a line per step where there is no terminal
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "model" / "model.safetensors").exists()
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [(m["kind"], m["step"]) for m in metrics] == [
        ("eval", 0), ("train", 1), ("train", 2), ("train", 3), ("eval", 3)
    ]  # fmt: skip
    for step in metrics[1:4]:
        for name in (names.ENTROPY_ALL, names.SHARES_STD, names.ADVANTAGE_MAX, names.CLIP_FRACTION):
            assert step[name] is not None
        assert step[names.tokens_per_second("generation")] > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stepz", "3"], "unknown flag --stepz"),
        (["--steps", "none"], "--steps none is not a positive number"),
        (["--model"], "--model needs a value"),
        (["--backend", "fsdp"], "--backend fsdp is neither deepspeed nor megatron"),
        (["--backend", "megatron", "--pipeline-parallel", "0"], "--pipeline-parallel 0 is not a positive number"),
        (["--tensor-parallel", "2"], "--tensor-parallel 2 needs --backend megatron"),
    ],
)
def test_wrong_flag_is_one_sentence_before_anything_is_set_up(flags: list[str], message: str, tmp_path: Path) -> None:
    ended = subprocess.run(["bash", str(SCRIPT), *flags], capture_output=True, text=True, timeout=20, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("quickstart: ") and message in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
