"""Measures the seconds to a held-out reward of 0.60: the quickstart on two cores, TRL 1.16 and other releases.

    python3 -m benchmarks.studies.time_to_reward --output docs/results/quickstart/time_to_reward.json

Each seed runs every side, a different one first each time. All have the quickstart's model, data, scorer, sizes and
learning rate, and are evaluated after each step. Evaluations and checkpoints do not count. TRL is installed below
--runs. ``--release NAME=FOLDER`` adds a checkout of another release, which has an environment of its own.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.studies.quickstart_runs import HELD_OUT, quickstart, rows_of, study_parser
from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.report import names

TRL = "TRL 1.16.0"
PREPARE = (sys.executable, "-m", "openrlhf_gtpo.cli.prepare")
MODEL = Path(".cache/quickstart/smollm2-135m-instruct")
FLAGS = (
    "--eval.steps",
    "1",
    "--eval.n_samples_per_prompt",
    "16",
    "--ckpt.save_steps",
    "-1",
    "--logger.dump_rollouts",
    "0",
)


def install_trl(packages: Path) -> None:
    """Install TRL without its dependencies, which this environment has, and make the model that all sides train."""
    if not packages.exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*install, TRL.lower().replace(" ", "==")], check=True)
    subprocess.run([*PREPARE, "smollm2", "--output", str(MODEL)], check=True, stdout=subprocess.DEVNULL)


def trl(packages: Path, folder: Path, steps: int, seed: int, until: float) -> None:
    data = folder / "data"
    data.mkdir(parents=True)
    sizes = ["--preset", "quickstart", "--train-size", "75", "--eval-size", "24", "--train-rows", str(steps * 16)]
    subprocess.run([*PREPARE, "task", *sizes, "--output", str(data)], check=True, stdout=subprocess.DEVNULL)
    command = [sys.executable, "-m", "benchmarks.studies.trl_quickstart", "--model", str(MODEL), "--data", str(data)]
    command += ["--output", str(folder), "--steps", str(steps), "--seed", str(seed), "--until", str(until)]
    environment = os.environ | {"PYTHONPATH": f"{packages}:{Path.cwd()}", "HF_HUB_OFFLINE": "1"}
    with folder.with_suffix(".log").open("w") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment)


def reached(folder: Path, launched: float, until: float) -> dict[str, Any]:
    """Find the first step with a held-out reward of ``until``: ``steps``, ``seconds`` in these steps, ``start``
    (seconds before the first), ``curve`` (each evaluation's reward, and the seconds of steps before it)."""
    path = folder / "metrics.jsonl"
    walls = {row["step"]: row[names.TIMING_STEP_WALL] for row in rows_of(path, names.KIND_TRAIN)}
    curve = [
        {
            "step": row["step"],
            "seconds": sum(walls[step] for step in walls if step <= row["step"]),
            "reward": row[HELD_OUT],
        }
        for row in rows_of(path, names.KIND_EVAL)
    ]
    first = next((point for point in curve if point["reward"] >= until), None)
    start = rows_of(path, names.KIND_RUN)[0]["time"] - launched
    found = {"steps": first and first["step"], "seconds": first and first["seconds"], "start": start}
    return {**found, "seconds_of_a_step": median(walls.values()), "curve": curve}


def main() -> None:
    parser = study_parser(__doc__, "time_to_reward", steps=10, seeds=3)
    parser.add_argument("--until", type=float, default=0.6, metavar="REWARD", help="default: 0.6")
    parser.add_argument("--release", action="append", default=[], metavar="NAME=FOLDER", help="another checkout")
    args = parser.parse_args()
    packages = (args.runs / "trl").resolve()
    install_trl(packages)

    def ours(folder: Path, seed: int, **more: Any) -> None:
        quickstart(folder, args.steps, seed, flags=FLAGS, **more)

    def theirs(folder: Path, seed: int) -> None:
        trl(packages, folder, args.steps, seed, args.until)

    sides: dict[str, Callable[[Path, int], None]] = {TRL: theirs}
    for release in args.release:
        name, _, checkout = release.partition("=")
        sides[name] = partial(ours, checkout=Path(checkout))
    sides |= {"this checkout": ours, "this checkout, Megatron": partial(ours, words=("--backend", "megatron"))}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for seed in range(1, args.seeds + 1):
        order = list(sides)
        for name in order[seed % len(order) :] + order[: seed % len(order)]:
            folder = (args.runs / f"{name.replace(' ', '-')}-seed{seed}").resolve()
            shutil.rmtree(folder, ignore_errors=True)
            launched = time.time()
            sides[name](folder, seed)
            found[name].append(reached(folder, launched, args.until))
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
            write_results(args.output, args, {"runs": found})
    rows = []
    for name, runs in found.items():
        cells = []
        for key in ("seconds", "steps", "seconds_of_a_step", "start"):
            values = [run[key] for run in runs]
            cells.append(" ".join("–" if value is None else f"{value:.0f}" for value in values))
        rows.append([name, *cells])
    print_table(
        f"to a held-out reward of {args.until:.2f}, by seed", ["", "seconds", "steps", "a step, s", "start, s"], rows
    )


if __name__ == "__main__":
    main()
