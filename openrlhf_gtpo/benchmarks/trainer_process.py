"""The trainer in a process of its own, ended as soon as it has made the steps that are wanted of it."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_metrics

COMMAND = (sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray")
_POLL_SECONDS = 0.5
_SECONDS_TO_END = 120  # for Ray to end engines and actors
_LAST_LINES = 20


class TrainerFailed(RuntimeError):
    """A run ended before it had made its steps; the message has its last words and where the log is."""


def run_trainer(name: str, argv: Sequence[str], folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train with ``argv`` for ``steps`` steps, without evaluating or saving anything, and return the metrics' lines.

    Args:
        name: of the run, for messages.
        argv: the trainer's flags.
        folder: for ``metrics.jsonl`` and ``train.log``, new; every node of a cluster must see it.
        steps: after which the trainer is ended; no model or checkpoint is left behind.

    Raises:
        TrainerFailed: it ended by itself, with fewer steps.
    """
    folder.mkdir(parents=True)
    metrics = folder / "metrics.jsonl"
    given = [word for word in argv if word != "--eval.before_training"]
    own = ["--logger.metrics_path", str(metrics), "--ckpt.path", str(folder / "checkpoints")]
    own += ["--ckpt.output_dir", str(folder / "model"), "--ckpt.save_steps", "-1", "--eval.steps", "-1"]
    log = folder / "train.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*COMMAND, *given, *own], stdout=output, stderr=subprocess.STDOUT, env=_environment()
        )
        try:
            while True:
                ended = process.poll() is not None  # before reading, so that the last line is read too
                rows = _rows(metrics)
                if sum(row["kind"] == names.KIND_TRAIN for row in rows) >= steps:
                    return rows
                if ended:
                    raise TrainerFailed(_last_words(name, process.returncode, rows, steps, log))
                time.sleep(_POLL_SECONDS)
        finally:
            _end(process)
            for name_of_weights in ("model", "checkpoints"):  # of a run that came to its own end, or was asked to stop
                shutil.rmtree(folder / name_of_weights, ignore_errors=True)


def _environment() -> dict[str, str]:
    """This process's, with this package where the trainer finds it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join([root, *(path for path in paths if path != root)])}


def _rows(metrics: Path) -> list[dict[str, Any]]:
    try:
        return read_metrics(metrics)
    except ValueError:  # not there yet, or nothing whole in it yet
        return []


def _end(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(name: str, code: int, rows: Sequence[dict[str, Any]], steps: int, log: Path) -> str:
    made = sum(row["kind"] == names.KIND_TRAIN for row in rows)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.startswith("train_ppo_ray")] or lines[-_LAST_LINES:]
    text = f"{name} ended with exit code {code} after {made} of {steps} steps; the whole log: {log}"
    if code == 0 and not rows:
        text += f" ({log.parent} has to be a folder that every node sees)"
    elif code == 0:
        text += " (its data may be used up)"
    return "\n".join([f"{text}. Its last words:", *(f"  {line}" for line in said)])
