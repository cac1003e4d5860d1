"""The training runs that the other scripts here disturb: a tiny model on this host, through Ray and vLLM."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from openrlhf_gtpo.cli import prepare
from openrlhf_gtpo.report import names

STALL_TIMEOUT = 30
SAMPLES = 4  # responses per prompt


@contextmanager
def inputs(questions: int) -> Iterator[Path]:
    """Yield a folder with the tiny model and a task of a number of questions, for :func:`start`. If the block fails,
    the folder is kept and named."""
    place = Path(tempfile.mkdtemp(prefix="reliability-"))
    try:
        assert prepare.main(["tiny-model", "--output", str(place / "model")]) == 0
        sizes = ["--train-size", str(questions), "--eval-size", "8"]
        assert prepare.main(["task", "--task", "products", *sizes, "--output", str(place / "task")]) == 0
        yield place
    except BaseException:
        print(f"The runs' files are in {place}.", file=sys.stderr)
        raise
    shutil.rmtree(place)


def start(place: Path, folder: Path, flags: Mapping[str, Any], *words: str) -> psutil.Popen:
    """Start a run with the inputs in ``place`` and its files in ``folder``, including its output, ``log``.

    Args:
        flags: its flags, without dashes, besides the flags of all runs.
        words: more words of its command line.
    """
    folder.mkdir(exist_ok=True)
    shared = {
        "actor.model_name_or_path": place / "model",
        "algo.advantage.estimator": "gtpo",
        "data.prompt_dataset": place / "task" / "train.jsonl",
        "data.label_key": "scorer_label",
        "data.max_len": 64,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": 8,
        "ckpt.output_dir": folder / "trained",
        "ckpt.path": folder / "checkpoints",
        "logger.metrics_path": folder / "metrics.jsonl",
    }
    argv = [str(word) for name, value in (shared | flags).items() for word in (f"--{name}", value)]
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv, "--data.apply_chat_template", *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "log").open("w") as log:
        return psutil.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def end(run: psutil.Popen) -> None:
    if run.poll() is None:
        run.terminate()
        run.wait()


def rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of steps in order of writing, including repeated steps."""
    with suppress(OSError):
        text = (folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, text) if row["kind"] == names.KIND_TRAIN]
    return []


def restarts_of(folder: Path) -> int:
    return (folder / "log").read_text().count("; restart ")


def notices_of(folder: Path) -> int:
    """How often a run was found hanging, or started again."""
    return restarts_of(folder) + (folder / "log").read_text().count("; ending the run.")


def until(condition: Callable[[], Any], run: psutil.Popen) -> None:
    deadline = time.monotonic() + 900
    while not condition():
        assert run.poll() is None, "the run ended"
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.1)


def cmdline(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def spread_by_fault(faults: Sequence[Mapping[str, Any]], *measured: str) -> dict[str, Any]:
    """By kind of fault: the count, and minimum, median and maximum of ``measured``."""
    by_kind = {}
    for kind in dict.fromkeys(fault["fault"] for fault in faults):
        alike = [fault for fault in faults if fault["fault"] == kind]
        values = {name: [fault[name] for fault in alike if name in fault] for name in measured}
        spreads = {name: [min(v), statistics.median(v), max(v)] for name, v in values.items() if v}
        by_kind[kind] = {"times": len(alike), **spreads}
    return by_kind
