"""Runs examples/scripts/quickstart.sh for a study, and keeps the folders so that an interrupted study resumes."""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.report import names

HELD_OUT = "eval_products_pass1"  # reward of a held-out answer to the quickstart's task


def study_parser(description: str | None, name: str, *, steps: int, seeds: int) -> Parser:
    """Make the parser of a study's flags, with default ``steps`` and ``seeds``. Its runs go to runs/``name``."""
    parser = Parser(description=description)
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help=f"of each run (default: {steps})")
    parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help=f"1 to N (default: {seeds})")
    parser.add_argument("--runs", type=Path, default=Path("runs", name), metavar="DIR", help="where runs go")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures to this JSON file")
    return parser


def quickstart(
    folder: Path,
    steps: int,
    seed: int,
    words: Sequence[str] = (),
    flags: Sequence[str] = (),
    packages: str = "",
    checkout: Path | None = None,
) -> Path:
    """Train into ``folder``, unless the run is finished, and return its metrics file.

    Args:
        words: arguments of the script.
        flags: flags of the trainer.
        packages: a folder that its processes search first for packages.
        checkout: another release's checkout, whose script and environment are used; ``folder`` must be absolute.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.exists() or rows_of(metrics, names.KIND_EVAL)[-1]["step"] != steps:
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        command = ["bash", "examples/scripts/quickstart.sh", "--steps", str(steps), "--seed", str(seed), *words]
        command += ["--output", str(folder), "--", *flags]
        environment = os.environ | ({"PYTHONPATH": f"{packages}:{Path.cwd()}"} if packages else {})
        with folder.with_suffix(".log").open("w") as log:
            subprocess.run(command, check=True, stdout=log, stderr=log, env=environment, cwd=checkout)
    return metrics


def before_and_after(metrics: Path) -> dict[str, float]:
    """Held-out reward ``before`` and ``after`` training."""
    first, *_, last = rows_of(metrics, names.KIND_EVAL)
    return {"before": first[HELD_OUT], "after": last[HELD_OUT]}


def rows_of(metrics: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, metrics.read_text().splitlines()) if row["kind"] == kind]
