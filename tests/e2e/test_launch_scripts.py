"""A preset in its CPU version, as written: settings that parse also run. ``benchmark train`` measures it: phases add
up to the step, tokens are the phase's, and neither trainer nor engine outlives the measurement. The DeepSpeed actor's
phases are checked in ``test_quickstart.py``, checkpoints and models of FP8 primary weights in ``tests/megatron``.
"""

import json
import math
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from benchmarks.suite.step_phases import Setup
from openrlhf_gtpo.report import names
from tests.e2e.conftest import ROOT
from tests.support.phases import check_phases

# Policy, reference model and engines take turns on both GPUs; old log-probs are those of policy and reference.
EVERYWHERE = Setup(
    gpus=2,
    busy={"rollout": 2, "old_log_probs": 2, "shaping": 0, "train": 2, "weight_sync": 2},
    passes={"rollout": 1, "old_log_probs": 2, "train": 3},
    epochs=1,
    precision={"rollout": "bf16"} | dict.fromkeys(("old_log_probs", "train"), "fp8 (emulated, blockwise)"),
)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_cpu_version_runs_and_is_measured(tmp_path: Path) -> None:
    """The most demanding preset: two logical nodes, tensor parallelism across them, colocated engines, emulated FP8,
    with FP8 primary weights, which go to the host and back, and to the engines.

    At an audit gate of 0 the entropies fall back to BF16 as soon as a sign flips.
    """
    command = ["bash", str(ROOT / "examples/scripts/benchmark_train.sh"), "--cpu", "--", "--train.seed", "2"]
    command += ["--vllm.sync_checksum", "--algo.advantage.is_correction_level", "token"]
    command += ["--megatron.fp8_audit_gate", "0", "--algo.gtpo.alpha2", "2"]
    # A reference model on the policy's GPUs, offloaded to make room.
    command += ["--ref.num_nodes", "2", "--ref.num_gpus_per_node", "1", "--algo.kl.init_coef", "0.01"]
    command += ["--algo.kl.estimator", "k3"]  # not negative for any sample
    environment = os.environ | {"MEASURE": "gtpo_32b", "OUTPUT": str(tmp_path / "run"), "FP8_PARAM": "1"}
    environment |= {"FP8_AUDIT_STEPS": "1", "WARMUP": "1", "STEPS": "1", "REPEAT": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=1500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    (place,) = (tmp_path / "run").glob("runs-*/*")
    entries = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["kind"] == names.KIND_TRAIN]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all(0 <= entry["reward/mean"] <= 1 and entry["grading_timed_out"] == 0 for entry in steps)
    assert all(entry["no_answer"] < 1 for entry in steps)  # Math-Verify read what the model wrote
    # The engines have the weights that the trainer multiplies with; only the trainer's activations are in FP8.
    assert all(abs(entry["vllm_kl"]) < 0.05 for entry in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[1]["kl"] > 0  # the reference is not trained
    for entry in steps:
        # Exactly 0 would mean BF16 compared with itself, and 1 a pass without scales.
        assert 1e-4 < entry["fp8/entropy_error_mean"] < 0.2 and 1 < entry["fp8/ratio_error"] < 1.2
        assert entry["fp8/share_rank_correlation"] > 0.5
        assert entry["fp8/old_policy_in_fp8"] == float(entry["fp8/sign_flips"] == 0)
        assert math.isfinite(entry["policy_loss"]) and entry[names.ENTROPY_ALL] > 0

    written = json.loads((tmp_path / "run" / "train.json").read_text())
    ((name, measured),) = written["configurations"].items()
    assert name == "this" and measured["setup"] == asdict(EVERYWHERE) and not written["ratios"]
    (run,) = measured["runs"]
    assert run == {"rows": steps[1:], **check_phases(steps[1:], EVERYWHERE)}
    response, prompt = steps[1][names.TOKENS_RESPONSE], steps[1][names.TOKENS_PROMPT]
    assert response == run["phases"]["rollout"]["tokens"]
    assert response == round(steps[1]["rollout/num_samples"] * steps[1][names.RESPONSE_LENGTH_MEAN])
    assert run["phases"]["step"]["tokens"] == response + prompt
    assert 0 < written["summary"][name]["phases"]["train"]["mfu"] < 1
    kept = {path.name for path in place.iterdir() if path.suffix != ".lock"}
    assert kept == {"metrics.jsonl", "train.log"}, "no weights are kept"
    assert (tmp_path / "run" / "train.png").exists() and "weight sync" in done.stdout
    left = [process for process in psutil.process_iter(["environ"]) if str(tmp_path) in str(process.info["environ"])]
    assert not left, "a process of the run outlives the measurement, which ends it by SIGTERM"
