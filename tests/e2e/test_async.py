"""A whole asynchronous run (``--train.async_enable``) is killed and goes on: through Ray, vLLM and Megatron, the
rollout that was sampled ahead is in the checkpoint, and once adapters are trained in the place of all weights.
``benchmarks/reliability/resume_exact.py`` compares more of it.
"""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from tests.e2e.conftest import ROOT

STEPS, KILLED_AFTER = 5, 3


def steps(output: Path) -> list[dict[str, Any]]:
    """Those that the run has made, in order; each once, however often it was started."""
    with suppress(OSError, ValueError):
        return [row for row in read_runs(output / "metrics.jsonl")[-1] if row["kind"] == names.KIND_TRAIN]
    return []


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("in_flight", [False, True], ids=["one step off", "weights in flight"])
def test_an_asynchronous_run_goes_on_with_the_rollout_that_was_ahead(in_flight: bool, tmp_path: Path) -> None:
    script = str(ROOT / "examples" / "scripts" / "quickstart.sh")
    command = ["bash", script, "--smoke", "--steps", str(STEPS), "--backend", "megatron", "--output", str(tmp_path)]
    flags = ["--train.async_enable", "--algo.advantage.is_correction_level", "token"]
    flags += ["--algo.advantage.is_correction_mode", "clip", "--algo.advantage.is_correction_threshold", "5"]
    flags += ["--rollout.entropy_audit_steps", "0"]  # which would have the engines wait for the trainer
    if in_flight:
        flags += ["--train.partial_rollout_enable"]
    else:  # the actor without adapters is the reference
        flags += ["--ds.lora.rank", "4", "--algo.kl.init_coef", "0.01", "--algo.kl.use_loss", "--vllm.sync_checksum"]

    first = psutil.Popen([*command, "--", *flags])
    while len(steps(tmp_path)) < KILLED_AFTER:
        assert first.poll() is None
        time.sleep(0.1)
    for process in [first, *first.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    first.wait()
    assert in_flight or [row[names.STALENESS_MEAN] for row in steps(tmp_path)][:3] == [0, 1, 1]

    assert psutil.Popen([*command, "--resume", "--", *flags]).wait() == 0
    again = steps(tmp_path)
    assert [row["step"] for row in again] == list(range(1, STEPS + 1))
    # In step 1 nothing can be ahead; a resumed run that sampled anew would have another 0.
    if in_flight:  # what is drawn with new weights depends on time
        assert 1 <= max(row[names.STALENESS_MAX] for row in again) <= 2
    else:
        assert [row[names.STALENESS_MEAN] for row in again] == [0] + [1] * (STEPS - 1)
    assert all(row[names.IDLE_TRAINER] < row[names.TIMING_STEP_WALL] for row in again)
    assert in_flight or (tmp_path / "model" / "adapter" / "adapter_model.safetensors").is_file()
