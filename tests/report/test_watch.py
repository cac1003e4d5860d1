"""The progress display ends with the run, and shows its last lines."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.watch import describe, watch

TRAIN = {
    "kind": names.KIND_TRAIN,
    "step": 1,
    names.REWARD_MEAN: 0.25,
    names.ENTROPY_ALL: 1.5,
    names.RESPONSE_LENGTH_MEAN: 12.0,
    names.TIMING_STEP_TOTAL: 20.4,
}


def test_describe_names_the_held_out_task_and_leaves_out_what_is_absent() -> None:
    assert describe({"kind": names.KIND_EVAL, "step": 0, "eval_gcd_pass1": 0.125}) == "held-out reward gcd 0.125"
    assert describe(TRAIN) == "reward 0.25  entropy 1.50  length 12  seconds 20.4"
    assert describe({"kind": names.KIND_TRAIN, "step": 1, names.REWARD_MEAN: 1.0}) == "reward 1.00"


def test_watch_prints_every_line_and_ends_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sampled = TRAIN | {names.SAMPLE: f"{'long ' * 40}What is\n[3 * 4]? 12", names.SAMPLE_REWARD: 1.0}
    lines = [json.dumps({"kind": "eval", "step": 0, "eval_gcd_pass1": 0.1}), json.dumps(sampled)]
    script = f"import time; time.sleep(1); open({str(path)!r}, 'w').write({chr(10).join(lines)!r} + chr(10))"
    trainer = subprocess.Popen([sys.executable, "-c", script])
    output = io.StringIO()
    started = time.monotonic()
    watch(path, 4, trainer.pid, Console(file=output, force_terminal=False, width=120))
    assert time.monotonic() - started < 20
    assert trainer.wait() == 0
    assert output.getvalue().splitlines() == [
        "step 0/4  held-out reward gcd 0.100",
        "step 1/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        f"  for example, with reward 1.00: …{('long ' * 40 + 'What is [3 * 4]? 12')[-80:]}",
    ]


def test_watch_of_a_run_that_dies_before_its_first_line_ends_quietly(tmp_path: Path) -> None:
    trainer = subprocess.Popen([sys.executable, "-c", "raise SystemExit(2)"])
    output = io.StringIO()
    watch(tmp_path / "metrics.jsonl", 4, trainer.pid, Console(file=output, force_terminal=False))
    assert output.getvalue() == ""
    trainer.wait()
