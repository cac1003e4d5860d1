"""``benchmark train`` on the real stack: would catch phases that overlap or leave the step, tokens that are not those of the
phase, and a trainer or engine that outlives the measurement.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.step_phases import PHASES, STEP

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_two_configurations_in_turns(trainer_argv: list[str], tmp_path: Path) -> None:
    """On two logical GPUs of a CPU host, an actor's and an engine's, which work in turns except in the weight sync."""
    words = ["--steps", "1", "--warmup", "1", "--matrix", "256", "--runs", str(tmp_path / "runs")]
    words += ["--output", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png"), "--compare", "deepspeed="]
    words += ["--compare", "megatron=--actor.backend megatron --train.max_tokens_per_gpu 128"]
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.benchmark", "train", *words, "--", *trainer_argv]
    command += ["--algo.advantage.estimator", "gtpo"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    written = json.loads((tmp_path / "r.json").read_text())
    assert list(written["configurations"]) == ["deepspeed", "megatron"]
    for name, measured in written["configurations"].items():
        (run,) = measured["runs"]
        (row,) = run["rows"]
        assert row["step"] == 2 and measured["setup"]["gpus"] == 2
        phases = run["phases"]
        step = phases[STEP]
        parts = {phase: phases[phase]["seconds"] for phase in PHASES}
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) + run["idle"]["seconds"] == pytest.approx(step["seconds"])
        assert 0 <= run["idle"]["share"] < 0.5, "a phase is counted twice, or most of the step in none"
        assert row[names.TIMING_OLD_LOG_PROBS] + row[names.TIMING_ADVANTAGES] <= row[names.TIMING_MAKE_EXPERIENCE]
        for one in phases.values():
            tokens = one["tokens_per_second_per_gpu"] * one["seconds"] * 2
            assert tokens == pytest.approx(one["tokens"]) and one["tokens"] > 0
        # 4 prompts with 4 responses of at most 8 tokens each, prompts of at most 56.
        response, prompt = row[names.TOKENS_RESPONSE], row[names.TOKENS_PROMPT]
        assert response == phases["rollout"]["tokens"] == round(16 * row[names.RESPONSE_LENGTH_MEAN])
        assert 16 <= response <= 128 and 16 < prompt <= 16 * 56
        assert phases["train"]["tokens"] == phases["old_log_probs"]["tokens"] == step["tokens"] == response + prompt
        assert phases["train"]["flops"] == 3 * phases["rollout"]["flops"] > 0
        working = sum(parts[phase] for phase in ("rollout", "old_log_probs", "train")) + 2 * parts["weight_sync"]
        assert run["idle"]["gpu_share"] == pytest.approx(1 - working / (2 * step["seconds"]))
        for process in ("actor/old_log_probs", "actor/ppo_train", "actor/broadcast", "engine/generation"):
            assert 0.01 < run["peak_memory_gib"][process] < 24, process
        assert 0 < written["summary"][name]["phases"]["train"]["mfu"] < 1
        (place,) = (tmp_path / "runs").glob(f"{name}-*")
        assert {path.name for path in place.iterdir()} == {"metrics.jsonl", "train.log"}, "no weights are kept"

    train = [written["configurations"][name]["runs"][0]["phases"]["train"] for name in ("deepspeed", "megatron")]
    speeds = [one["tokens"] / one["seconds"] for one in train]
    assert written["ratios"]["megatron"]["train"] == pytest.approx([speeds[1] / speeds[0]] * 3)
    assert (tmp_path / "r.png").exists() and "weight sync" in ended.stdout
