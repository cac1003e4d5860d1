"""A preset in its CPU version, as written: settings that parse also run."""

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from openrlhf_gtpo.report import names
from tests.e2e.conftest import ROOT


@pytest.mark.e2e
@pytest.mark.slow
def test_the_cpu_version_runs(tmp_path: Path) -> None:
    """The most demanding preset: two logical nodes, tensor parallelism across them, colocated engines, emulated FP8,
    with FP8 primary weights, which go to the host and back, to the engines, and into a checkpoint and a model.

    At an audit gate of 0 the old-policy forward falls back to BF16 as soon as a sign flips.
    """
    output = tmp_path / "run"
    command = ["bash", str(ROOT / "examples/scripts/train.sh"), "gtpo_32b", "--cpu", "--", "--train.seed", "2"]
    command += ["--vllm.sync_checksum", "--algo.advantage.is_correction_level", "token"]
    command += ["--megatron.fp8_audit_gate", "0", "--algo.gtpo.alpha2", "2"]
    # A reference model on the policy's GPUs, which offloads to make room.
    command += ["--ref.num_nodes", "2", "--ref.num_gpus_per_node", "1", "--algo.kl.init_coef", "0.01"]
    command += ["--algo.kl.estimator", "k3"]  # which no sample makes negative
    environment = os.environ | {"OUTPUT": str(output), "STEPS": "2", "SAVE_STEPS": "2", "FP8_PARAM": "1"}
    environment |= {"FP8_AUDIT_STEPS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    entries = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if entry["kind"] == names.KIND_TRAIN]
    assert [entry["step"] for entry in steps] == [1, 2]
    assert all(0 <= entry["reward/mean"] <= 1 and entry["grading_timed_out"] == 0 for entry in steps)
    assert all(entry["no_answer"] < 1 for entry in steps)  # Math-Verify read what the model wrote
    # The engines have the weights that the trainer multiplies with; activations are in FP8 here alone.
    assert all(abs(entry["vllm_kl"]) < 0.05 for entry in steps)
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-6) and steps[1]["kl"] > 0  # the reference is not trained
    for entry in steps:
        # Exactly 0 would be BF16 compared with itself, and 1 a pass without scales.
        assert 1e-4 < entry["fp8/entropy_error_mean"] < 0.2 and 1 < entry["fp8/ratio_error"] < 1.2
        assert entry["fp8/share_rank_correlation"] > 0.5
        assert entry["fp8/old_policy_in_fp8"] == float(entry["fp8/sign_flips"] == 0)
        assert math.isfinite(entry["policy_loss"]) and entry[names.ENTROPY_ALL] > 0
    assert (output / "model" / "model.safetensors").exists()
    assert (output / "checkpoints" / "_actor").is_dir()
