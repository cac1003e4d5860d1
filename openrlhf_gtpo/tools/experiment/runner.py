"""Runs an experiment's trainings one after another, each in its folder, and resumes after an interruption.

Several hosts that run the same command share the work through the folder: a run belongs to the holder of its lock.
"""

import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from openrlhf_gtpo.errors import STOPPED_STATUS, UsageError
from openrlhf_gtpo.platform.files import replace_text
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.report.watch import bar_columns, describe
from openrlhf_gtpo.tools.experiment.grid import Grid, Run, words
from openrlhf_gtpo.tools.launch.process_tree import run_and_clear

_SIGNALS = range(129, 256)  # exit statuses after a signal to this process or to the run
_SECONDS = "seconds"  # a file


def is_finished(run: Run, grid: Grid) -> bool:
    """True if ``run`` has completed and, if the grid asks for it, its model was evaluated."""
    return is_trained(run) and (grid.evaluate is None or (run.folder / "evaluation" / "flags.json").is_file())


def check_folders(grid: Grid) -> None:
    """Reject a folder with a run that was trained or evaluated with other flags than those in ``grid``.

    Raises:
        UsageError: there is such a run, or the folder has other files. The message names the run and the flag.
    """
    if grid.output.exists() and not grid.output.is_dir():
        raise UsageError(f"output {grid.output} is not a folder; name another.")
    for run in grid.runs:
        if grid.evaluate is not None:
            _refuse_others(run.folder / "evaluation", "evaluated", grid.evaluate)
        _refuse_others(run.folder, "run", run.flags)
        files = {path.name for path in run.folder.glob("[!.]*")}
        if files - {"lock"} and "flags.json" not in files:
            raise UsageError(f"{run.folder} has files that are not runs of this experiment; name another output.")


def _refuse_others(folder: Path, done: str, flags: Mapping[str, Any]) -> None:
    file = folder / "flags.json"
    if not file.exists():
        return
    recorded, current = json.loads(file.read_text()), json.loads(json.dumps(flags))
    for flag in sorted(recorded.keys() | current.keys()):
        if recorded.get(flag) != current.get(flag):
            raise UsageError(
                f"{folder} was {done} with --{flag} {recorded.get(flag)}, and the experiment now has "
                f"{current.get(flag)}; name another output, or remove that folder."
            )


def run_all(grid: Grid) -> list[str]:
    """Train every unfinished run that no other process is training. On a terminal, a bar shows how many are finished,
    what the current run is doing, and how long the rest takes at the average time so far, starts and evaluations
    included.

    Returns:
        A sentence for each failed run, already printed. The run's log has the reason.

    Raises:
        KeyboardInterrupt: a signal or a request to stop ended a run.
    """
    failures: list[str] = []
    done: dict[Path, float | None] = {}  # known seconds of finished runs, whose files are read once
    console = Console(stderr=True)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with Progress(*bar_columns(console), console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(grid.runs), left="")

        def show(run: Run) -> bool:
            """Update the bar. Returns False: nothing hangs (``run_and_clear``)."""
            if console.is_terminal:
                for other in grid.runs:
                    if other.folder not in done and is_finished(other, grid):
                        done[other.folder] = _seconds(other)
                known = [seconds for seconds in done.values() if seconds is not None]
                left = _left(known, len(grid.runs) - len(done), time.time() - began)
                progress.update(bar, completed=len(done), description=_doing(run), left=left)
            return False

        for run in grid.runs:
            with _locked(run.folder) as is_ours:
                if is_ours and not is_finished(run, grid):
                    finished = sum(is_finished(other, grid) for other in grid.runs)
                    say(f"{run}: {run.folder} ({finished} of {len(grid.runs)} runs are finished)")
                    began = time.time()
                    for failure in _make(run, grid, partial(show, run)):
                        failures.append(failure)
                        say(failure)
                    began = time.time()
                    show(run)
                elif not is_ours:
                    say(f"{run}: another process is working on it.")
    return failures


def _make(run: Run, grid: Grid, show: Callable[[], bool]) -> list[str]:
    log = run.folder / "log"
    if not is_trained(run):
        resume = ["--ckpt.load_enable"] if has_checkpoint(run) else []
        if not resume:  # a partial run counts nowhere
            for name in ("metrics.jsonl", "model", "model_critic", "checkpoints", _SECONDS):
                path = run.folder / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        replace_text(run.folder / "flags.json", json.dumps(run.flags, indent=1) + "\n")
        status, how = _call("openrlhf_gtpo.cli.train_ppo_ray", [*words(run.flags), *resume], log, show)
        if status or not is_trained(run):
            return [f"{run} {how}"]
    if grid.evaluate is not None:
        flags = grid.evaluate | {"model": run.folder / "model", "output": run.folder / "evaluation"}
        status, how = _call("openrlhf_gtpo.cli.evaluate", words(flags), log, show)
        if status:
            return [f"The evaluation of {run} {how}"]
        replace_text(run.folder / "evaluation" / "flags.json", json.dumps(grid.evaluate, indent=1) + "\n")
    return []


def _call(module: str, argv: Sequence[str], log: Path, show: Callable[[], bool]) -> tuple[int, str]:
    """Run ``python3 -m module argv`` with its output appended to ``log``, and leave none of its processes behind. Call
    ``show`` about once a second meanwhile. Add its seconds to a file beside the log. Return its status, and how it
    ended, as a clause."""
    start = log.stat().st_size if log.exists() else 0
    shell = ["sh", "-c", 'log=$1; shift; exec "$@" >>"$log" 2>&1', "sh", str(log)]
    command = [*shell, sys.executable, "-m", module, *argv]
    # Each training makes or resumes a W&B run of its own (training/controller/wandb_run.py).
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_RUN_ID"}
    began = time.time()
    try:
        status = run_and_clear(command, environment, patience=60.0, hangs=show)
    finally:
        seconds = log.with_name(_SECONDS)
        earlier = float(seconds.read_text()) if seconds.exists() else 0.0
        replace_text(seconds, f"{earlier + time.time() - began:.0f}\n")
    if status in _SIGNALS or status == STOPPED_STATUS:
        raise KeyboardInterrupt
    return status, f"ended with status {status} ({log}): {_last_words(log, start)}"


def has_checkpoint(run: Run) -> bool:
    """True if the training of ``run`` resumes from a checkpoint; without one it restarts."""
    return any((run.folder / "checkpoints" / "_actor").glob("*"))


def is_trained(run: Run) -> bool:
    """True if the training of ``run`` has completed, even without its evaluation."""
    # A run without metrics restarts, and its model is removed. Other errors, as of a shared folder, are raised.
    with suppress(FileNotFoundError), (run.folder / "metrics.jsonl").open(), suppress(ValueError):
        return any(row.get("ended") for row in read_runs(run.folder)[-1])
    return False


def _last_words(log: Path, start: int) -> str:
    """The last message of this package's commands from byte ``start`` on, or else the last line."""
    lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines() if log.exists() else []
    messages = [line for line in lines if line.startswith(("train_ppo_ray", "evaluate:"))]
    return (messages or lines or ["no output"])[-1][:500]


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock ``folder`` until the block or the process ends; yields False if another process has the lock."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _doing(run: Run) -> str:
    with suppress(ValueError):
        rows = [row for row in read_runs(run.folder)[-1] if row["kind"] != names.KIND_RUN]
        if rows:
            return f"{run}: step {rows[-1]['step']}  {describe(rows[-1])}"
    return f"{run}: starting"


def _seconds(run: Run) -> float | None:
    """Seconds of all of a run's starts and its evaluation; None if unknown."""
    with suppress(OSError, ValueError):
        return float((run.folder / _SECONDS).read_text())
    return None


def _left(spent: Sequence[float], runs: int, seconds: float) -> str:
    """The time left for ``runs`` runs, the first of which has been running for ``seconds``."""
    if not spent or not runs:
        return ""
    each = sum(spent) / len(spent)
    return f"about {timedelta(seconds=round(each * runs - min(seconds, each)))} left"
