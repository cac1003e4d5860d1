"""The progress display ends with the run, and shows its last lines."""

import io
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter
from openrlhf_gtpo.report.watch import process_runs, watch

TRAIN = {
    "kind": names.KIND_TRAIN,
    "step": 1,
    names.REWARD_MEAN: 0.25,
    names.ENTROPY_ALL: 1.5,
    names.RESPONSE_LENGTH_MEAN: 12.0,
    names.TIMING_STEP_TOTAL: 20.4,
}


pytestmark = pytest.mark.usefixtures("brief_waits")


def test_watch_prints_every_line_and_ends_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sampled = TRAIN | {names.SAMPLE: f"{'long ' * 40}What is\n[3 * 4]? 12", names.SAMPLE_REWARD: 1.0}
    warning = {f"{names.WARNING_PREFIX}groups": "nothing."}
    steps = [{"kind": "eval", "step": 0, "eval_gcd[/hard]_pass1": 0.1}, sampled | warning]
    steps += [{**TRAIN, "step": step, **more} for step, more in ((2, warning), (3, {}), (4, warning))]
    lines = [json.dumps(step) for step in steps]
    script = f"import time; time.sleep(0.3); open({str(path)!r}, 'w').write({chr(10).join(lines)!r} + chr(10))"
    trainer = subprocess.Popen([sys.executable, "-c", script])
    output = io.StringIO()
    started = time.monotonic()
    watch(path, 4, partial(process_runs, trainer.pid), Console(file=output, force_terminal=False, width=120))
    assert time.monotonic() - started < 20
    assert trainer.wait() == 0
    assert output.getvalue().splitlines() == [
        "step 0/4  held-out reward gcd[/hard] 0.100",
        "step 1/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        "Warning, from step 1 on: nothing.",
        f"  for example, with reward 1.00: …{('long ' * 40 + 'What is [3 * 4]? 12')[-80:]}",
        "step 2/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        "step 3/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        "step 4/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        "Warning, from step 4 on: nothing.",
    ]


@pytest.mark.parametrize(("after", "planned"), [(0, 8), (3, 8), (3, 4)])
def test_watch_prints_steps_that_the_file_has_already(tmp_path: Path, after: int, planned: int) -> None:
    """An earlier run died after its fifth step: the next begins anew, or goes on from step 3. It may make more steps
    than planned."""
    path = tmp_path / "metrics.jsonl"
    with closing(MetricsWriter(path)) as writer:
        writer.begin(0, {})
        for step in range(1, 6):
            writer.write(names.KIND_TRAIN, step, {names.REWARD_MEAN: 0.75})
    steps = [after + 1, after + 2, after + 3]
    script = (
        "import time; from openrlhf_gtpo.report.metrics import MetricsWriter\n"
        f"time.sleep(0.5); writer = MetricsWriter({str(path)!r}); writer.begin({after}, {{}})\n"
        f"for step in {steps}: time.sleep(0.2); writer.write('train', step, {{{names.REWARD_MEAN!r}: 0.25}})"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script])
    output = io.StringIO()
    watch(path, planned, partial(process_runs, trainer.pid), Console(file=output, force_terminal=False, width=120))
    trainer.wait()
    said = output.getvalue().splitlines()
    assert said == [f"step {step}/{max(planned, step)}  reward 0.25" for step in steps]


def test_on_a_terminal_the_bar_says_the_phase_and_the_time_left_inside_a_step(tmp_path: Path) -> None:
    """In the second of four steps of 30 s; the phase that an earlier start reported is not repeated."""
    path = tmp_path / "metrics.jsonl"
    shown: list[str] = []
    for said_before_the_start in (True, False):
        writer = MetricsWriter(path)
        writer.begin(0, {})
        writer.write(names.KIND_TRAIN, 1, {names.TIMING_STEP_WALL: 30.0, names.REWARD_MEAN: 0.25})
        writer.phase(names.PPO_TRAIN)
        output = io.StringIO()
        os.utime(tmp_path / "metrics.jsonl.phase", (time.time() + (-60 if said_before_the_start else 5),) * 2)
        trainer = subprocess.Popen(["sleep", "1.2"])
        watch(path, 4, partial(process_runs, trainer.pid), Console(file=output, force_terminal=True, width=160))
        shown.append(output.getvalue())
        trainer.wait()
    stale, bar = shown
    assert "starting Ray, vLLM and the trainer" in stale and "training" not in stale and "left" not in stale
    assert "reward 0.25; training" in bar and "1/4" in bar
    assert "0:01:29 left" in bar or "0:01:28 left" in bar  # three steps, less the time spent on the second
    writer.end()
    assert not (tmp_path / "metrics.jsonl.phase").exists()
