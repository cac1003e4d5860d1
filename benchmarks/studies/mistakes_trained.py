"""Trains the smoke quickstart's model on its task, but longer, with the methods of benchmarks.studies.mistakes.

    python3 -m benchmarks.studies.mistakes_trained --output trained.json --plot trained.png       twenty minutes

The controller of a run imports a copy of this package in which a method replaces GTPO's advantages. Finished runs are
kept: run it again to continue.
"""

import shutil
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.studies.mistakes import plot
from benchmarks.studies.quickstart_runs import before_and_after, quickstart, rows_of, study_parser
from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.report import names

METHODS = ("GTPO", "GRPO", "one polarity", "entropies clipped", "micro-batches of 1", "micro-batches of 4")
FLAGS: tuple[str, ...] = ("--rollout.entropy", "sampler", "--eval.n_samples_per_prompt", "16")
FLAGS += ("--ckpt.save_steps", "-1", "--logger.dump_rollouts", "0")

_CREDIT = """
from dataclasses import replace


def _advantages(entropy, mask, outcome, group_ids, config, length_penalty):
    from benchmarks.studies.mistakes import METHODS

    return METHODS[{name!r}](entropy, mask, outcome, group_ids)


ESTIMATORS["gtpo"] = replace(ESTIMATORS["gtpo"], advantages=_advantages)
"""


def main() -> None:
    parser = study_parser(__doc__, "mistakes", steps=80, seeds=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the rewards, five steps at a time")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for seed in range(1, args.seeds + 1):
        for name, seeds in runs.items():
            seeds.append(_run(args.runs / f"{name.replace(' ', '_')}-seed{seed}", name, args.steps, seed))
            print(f"seed {seed}, {name}: {seeds[-1]['before']:.3f} to {seeds[-1]['after']:.3f}", flush=True)
    rows = []
    for name, seeds in runs.items():
        pairs = [run["after"] - other["after"] for run, other in zip(seeds, runs["GTPO"], strict=True)]
        columns = [[run["before"] for run in seeds], [run["after"] for run in seeds], pairs]
        rows.append([name, *(f"{fmean(values):.3f} ± {stdev(values):.3f}" for values in columns)])
    print_table("held-out reward", ["method", "before", "after", "less GTPO's"], rows)
    write_results(args.output, args, {"flags": FLAGS, "runs": runs})
    if args.plot:
        plot(
            {name: [{"reward": _by_five(run["reward"])} for run in seeds] for name, seeds in runs.items()},
            args.plot,
            5,
        )


def _by_five(values: list[float]) -> list[float]:
    return [fmean(values[i : i + 5]) for i in range(0, len(values), 5)]


def _run(folder: Path, name: str, steps: int, seed: int) -> dict[str, Any]:
    """Held-out reward ``before`` and ``after``, and each step's reward and entropy."""
    with TemporaryDirectory() as packages:
        shutil.copytree("openrlhf_gtpo", Path(packages) / "openrlhf_gtpo")
        with (Path(packages) / "openrlhf_gtpo" / "algorithms" / "estimators.py").open("a") as file:
            file.write(_CREDIT.format(name=name))
        metrics = quickstart(folder, steps, seed, ("--smoke",), FLAGS, packages)
    trained = rows_of(metrics, names.KIND_TRAIN)
    return {
        **before_and_after(metrics),
        "reward": [row["reward"] for row in trained],
        "entropy": [row[names.ENTROPY_ALL] for row in trained],
    }


if __name__ == "__main__":
    main()
