"""The progress display ends with the run, and shows its last lines."""

import io
import json
import os
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.progress import Progress

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report import watch as module
from openrlhf_gtpo.report.metrics import MetricsWriter, show_phase
from openrlhf_gtpo.report.watch import watch

NUMBERS = {
    names.REWARD_MEAN: 0.25,
    names.ENTROPY_ALL: 1.5,
    names.RESPONSE_LENGTH_MEAN: 12.0,
    names.TIMING_STEP_TOTAL: 20.4,
}
TRAIN = {"kind": names.KIND_TRAIN, "step": 1, **NUMBERS}


pytestmark = pytest.mark.usefixtures("brief_waits")


class Trainer:
    """What ``watch`` asks whether it still runs: it does one thing each time, and then has ended."""

    def __init__(self, *does: Callable[[], object]) -> None:
        self._does = list(does)

    def __call__(self) -> bool:
        if self._does:
            self._does.pop(0)()
        return bool(self._does)


def console(output: io.StringIO, terminal: bool = False) -> Console:
    return Console(file=output, force_terminal=terminal, width=80 if terminal else 160)


def test_watch_prints_every_line_and_ends_with_the_process(tmp_path: Path) -> None:
    path, output = tmp_path / "metrics.jsonl", io.StringIO()
    sampled = TRAIN | {names.SAMPLE: f"{'long ' * 40}What is\n[3 * 4]? 12", names.SAMPLE_REWARD: 1.0}
    warning = {f"{names.WARNING_PREFIX}groups": "nothing."}
    outcomes = {names.OUTCOMES: "Rewards are 0 to 0.5."}
    steps = [{"kind": "eval", "step": 0, "eval_gcd[/hard]_pass1": 0.1}, sampled | warning | outcomes]
    steps += [{**TRAIN, "step": step, **more} for step, more in ((2, warning), (3, {}), (4, warning))]
    lines = [json.dumps(step) for step in steps]
    watch(path, 4, Trainer(lambda: None, lambda: path.write_text("\n".join(lines) + "\n")), console(output))
    assert output.getvalue().splitlines() == [
        "step 0/4  held-out reward gcd[/hard] 0.100",
        "step 1/4  reward 0.25  entropy 1.50  length 12  seconds 20.4",
        "Rewards are 0 to 0.5.",
        "Warning, from step 1 on: nothing.",
        f"  for example, with reward 1.00: …{('long ' * 40 + 'What is [3 * 4]? 12')[-80:]}",
        *(f"step {step}/4  reward 0.25  entropy 1.50  length 12  seconds 20.4" for step in (2, 3, 4)),
        "Warning, from step 4 on: nothing.",
    ]


@pytest.mark.parametrize(("after", "planned"), [(0, 8), (3, 8), (3, 4)])
def test_watch_prints_steps_that_the_file_has_already(tmp_path: Path, after: int, planned: int) -> None:
    """An earlier run died after its fifth step: the next begins anew, or goes on from step 3. It may make more steps
    than planned."""
    path, output = tmp_path / "metrics.jsonl", io.StringIO()
    with closing(MetricsWriter(path)) as writer:
        writer.begin(0, {})
        for step in range(1, 6):
            writer.write(names.KIND_TRAIN, step, {names.REWARD_MEAN: 0.75})
    with closing(MetricsWriter(path)) as writer:
        steps = [after + 1, after + 2, after + 3]
        made = [partial(writer.write, names.KIND_TRAIN, step, {names.REWARD_MEAN: 0.25}) for step in steps]
        watch(path, planned, Trainer(lambda: None, lambda: writer.begin(after, {}), *made), console(output))
    said = output.getvalue().splitlines()
    assert said == [f"step {step}/{max(planned, step)}  reward 0.25" for step in steps]


def test_on_a_terminal_the_bar_says_the_phase_and_the_time_left_inside_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second of four steps of 30 s; the phase that an earlier start reported is not repeated."""
    path, now = tmp_path / "metrics.jsonl", time.time()
    shown: list[str] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(time=lambda: now, sleep=lambda _: None))
    monkeypatch.setattr(Progress, "update", partialmethod(Progress.update, refresh=True))  # not ten times a second

    def wait() -> None:
        nonlocal now
        now += 0.5

    for said_before_the_start in (True, False):
        writer = MetricsWriter(path)
        writer.begin(0, {})
        writer.write(names.KIND_TRAIN, 1, {names.TIMING_STEP_WALL: 30.0, **NUMBERS})
        output = io.StringIO()

        def said(phase: str, seconds: float = -60 if said_before_the_start else 5) -> None:
            show_phase(path, phase)
            os.utime(tmp_path / "metrics.jsonl.phase", (now + seconds,) * 2)
            wait()

        does = [partial(said, phase) for phase in (*names.STARTING, names.PPO_TRAIN)]
        watch(path, 4, Trainer(*does, wait, wait), console(output, terminal=True))
        shown.append(output.getvalue())
    stale, bar = shown
    assert "starting the trainer" in stale and "training" not in stale and "left" not in stale
    assert all(doing in bar for doing in names.STARTING.values())
    assert "training  reward 0.25" in bar and "1/4" in bar  # at 80 columns, where not all of it fits
    assert "0:01:29 left" in bar  # three steps, less the time spent on the second
    writer.end()
    assert not (tmp_path / "metrics.jsonl.phase").exists()
