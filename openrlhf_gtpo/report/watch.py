"""A progress bar over a run's ``metrics.jsonl`` while another process trains."""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import datasource_of, held_out_names, phase_file, read_runs

_POLL_SECONDS = 0.5
_SAMPLE_LENGTH = 80


class ShortenedColumn(TextColumn):
    """A task's description, truncated to the room that the other columns leave on the line."""

    def __init__(self) -> None:
        super().__init__("{task.description}", markup=False, table_column=Column())

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def bar_columns(console: Console) -> tuple[ProgressColumn, ...]:
    """Return the columns of a task's line: description, bar, count and times; its field ``left`` is the time left."""
    bar, left = BarColumn(40 if console.width >= 120 else 15), TextColumn("{task.fields[left]}")
    return SpinnerColumn(), ShortenedColumn(), bar, MofNCompleteColumn(), TimeElapsedColumn(), left


def watch(path: Path, steps: int, runs: Callable[[], bool], console: Console | None = None) -> None:
    """Show progress until the run ends: as a bar on a terminal, elsewhere as a line per step.

    Args:
        path: the run's metrics file; it need not exist yet.
        steps: training steps of the whole run.
        runs: tells whether the run still runs.
    """
    console = console or Console(stderr=True)
    shown: Mapping[str, Any] | None = None  # the latest entry
    last: Mapping[str, Any] = {}
    warned: Set[str] = set()  # warnings of the previous step
    started, begun, line = time.time(), 0.0, ""
    with Progress(*bar_columns(console), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting the trainer", total=steps, left="")
        running = True
        while running:
            # Ask for the process first, so that its last lines are still read.
            running = runs()
            try:
                entries = read_runs(path)[-1]
            except (OSError, ValueError):  # no file, or no complete line yet
                entries = []
            # Print lines above the bar.
            for entry in _behind(shown, entries):
                if entry["kind"] == names.KIND_RUN:  # a new run, or one that resumed from a checkpoint
                    last, warned = {"step": entry["step"]}, set()
                    continue
                line = describe(entry)
                if entry["kind"] == names.KIND_TRAIN:
                    last = entry
                if entry.get("time", started) < started:
                    continue  # older than this start
                steps = max(steps, entry["step"])  # other flags may have given the trainer more steps
                if not console.is_terminal or entry["kind"] == names.KIND_EVAL:
                    console.print(f"step {entry['step']}/{steps}  {line}", markup=False, highlight=False)
                if names.OUTCOMES in entry:
                    console.print(entry[names.OUTCOMES], style="cyan", markup=False, highlight=False, soft_wrap=True)
                if entry["kind"] == names.KIND_TRAIN:
                    warnings = {name for name in entry if name.startswith(names.WARNING_PREFIX)}
                    for name in sorted(warnings - warned):
                        text = f"Warning, from step {entry['step']} on: {entry[name]}"
                        console.print(text, style="bold yellow", markup=False, highlight=False, soft_wrap=True)
                    warned = warnings
                if names.SAMPLE in entry:
                    text = " ".join(entry[names.SAMPLE].split())
                    ending = text if len(text) <= _SAMPLE_LENGTH else f"…{text[-_SAMPLE_LENGTH:]}"
                    sample = f"  for example, with reward {entry[names.SAMPLE_REWARD]:.2f}: {ending}"
                    console.print(sample, markup=False, highlight=False, soft_wrap=True)
            shown = entries[-1] if entries else shown
            # The bar.
            phase = _phase(path, started)
            if phase in names.STARTING:
                progress.update(bar, description=names.STARTING[phase])
            elif phase in names.DOING:
                begun = begun or time.time()
                done, left = _done(last, steps, begun)
                doing = "  ".join(filter(None, (names.DOING[phase], line)))
                progress.update(bar, description=doing, completed=done, total=steps, left=left)
            if running:
                time.sleep(_POLL_SECONDS)
        progress.update(bar, description=line, completed=last.get("step", 0), total=steps, left="")


def _behind(shown: Mapping[str, Any] | None, entries: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries after ``shown``; all of them if it is gone."""
    return list(takewhile(lambda entry: entry != shown, reversed(entries)))[::-1]


def _phase(path: Path, started: float) -> str:
    """What the run is doing, as in ``names``; empty if it has not said so since ``started``."""
    try:
        file = phase_file(path)
        return file.read_text() if file.stat().st_mtime >= started else ""
    except OSError:
        return ""


def _done(last: Mapping[str, Any], steps: int, begun: float) -> tuple[float, str]:
    """Steps done, including a part of the current one, and the time left if each takes as long as ``last``'s step. At
    a start, ``last`` has only the number of finished steps."""
    seconds = last.get(names.TIMING_STEP_WALL)
    if not seconds:
        return last.get("step", 0), ""
    # Never a whole step: a step counts once its line is written.
    part = min((time.time() - max(last["time"], begun)) / seconds, 0.99) if last["step"] < steps else 0.0
    done = last["step"] + part
    return done, f"{timedelta(seconds=round((steps - done) * seconds))} left"


def describe(entry: Mapping[str, Any]) -> str:
    """Format the few numbers of a metrics entry that show how a run is doing."""
    if entry["kind"] == names.KIND_EVAL:
        rewards = (f"{datasource_of(name)} {entry[name]:.3f}" for name in held_out_names([entry]))
        return f"held-out reward {', '.join(rewards)}"
    parts = [("reward", names.REWARD_MEAN, ".2f"), ("entropy", names.ENTROPY_ALL, ".2f")]
    parts += [("length", names.RESPONSE_LENGTH_MEAN, ".0f"), ("seconds", names.TIMING_STEP_TOTAL, ".1f")]
    return "  ".join(f"{label} {entry[key]:{form}}" for label, key, form in parts if entry.get(key) is not None)


def process_runs(pid: int) -> bool:
    """True while a process runs; a zombie counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
