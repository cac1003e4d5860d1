"""``benchmark train`` on the real stack: phases add up to the step, tokens are the phase's, and neither trainer nor
engine outlives the measurement. The DeepSpeed actor's phases are checked in ``test_quickstart.py``.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from openrlhf_gtpo.report import names
from tests.e2e.phases import SPLIT, check_phases

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_a_megatron_run_is_measured(trainer_argv: list[str], tmp_path: Path) -> None:
    """On two logical GPUs of a CPU host, an actor's and an engine's."""
    words = ["--steps", "1", "--warmup", "1", "--matrix", "256", "--runs", str(tmp_path / "runs")]
    words += ["--output", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.benchmark", "train", *words, "--", *trainer_argv]
    command += ["--algo.advantage.estimator", "gtpo", "--actor.backend", "megatron"]
    command += ["--train.max_tokens_per_gpu", "128"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-4000:]
    written = json.loads((tmp_path / "r.json").read_text())
    ((name, measured),) = written["configurations"].items()
    assert name == "this" and measured["setup"] == asdict(SPLIT) and not written["ratios"]
    (run,) = measured["runs"]
    (row,) = run["rows"]
    assert row["step"] == 2
    assert run == {"rows": [row], **check_phases([row])}
    # 4 prompts with 4 responses of at most 8 tokens each, prompts of at most 56.
    response, prompt = row[names.TOKENS_RESPONSE], row[names.TOKENS_PROMPT]
    assert response == run["phases"]["rollout"]["tokens"] == round(16 * row[names.RESPONSE_LENGTH_MEAN])
    assert 16 <= response <= 128 and 16 < prompt <= 16 * 56
    assert run["phases"]["step"]["tokens"] == response + prompt
    assert 0 < written["summary"][name]["phases"]["train"]["mfu"] < 1
    (place,) = (tmp_path / "runs").iterdir()
    assert {path.name for path in place.iterdir()} == {"metrics.jsonl", "train.log"}, "no weights are kept"
    assert (tmp_path / "r.png").exists() and "weight sync" in ended.stdout
    left = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(process.info["cmdline"])]
    assert not left, "a trainer or engine outlives the measurement"
