"""Compares the held-out reward of asynchronous and synchronous runs: the smoke quickstart's model and task, longer.

    python3 -m benchmarks.studies.async_reward --output docs/results/async/reward.json     half an hour on two cores

Every seed is trained in each mode, one run after the other. Finished runs are kept: run it again to continue.
"""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.studies.quickstart_runs import HELD_OUT, before_and_after, quickstart, rows_of, study_parser
from benchmarks.suite.results import write_results
from openrlhf_gtpo.report import names

COMMON: tuple[str, ...] = ("--rollout.entropy", "sampler", "--algo.advantage.is_correction_level", "token")
COMMON += ("--algo.advantage.is_correction_mode", "clip", "--algo.advantage.is_correction_threshold", "5")
COMMON += ("--rollout.entropy_audit_steps", "0", "--eval.n_samples_per_prompt", "16", "--ckpt.save_steps", "-1")
MODES: dict[str, tuple[str, ...]] = {
    "synchronous": (),
    "one step off": ("--train.async_enable",),
    "in flight": ("--train.async_enable", "--train.partial_rollout_enable", "--train.max_staleness", "1"),
}


def main() -> None:
    args = study_parser(__doc__, "async_reward", steps=40, seeds=5).parse_args()
    rewards: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for seed in range(1, args.seeds + 1):
        for mode, flags in MODES.items():
            rewards[mode].append(_run(args.runs / f"{mode.replace(' ', '_')}-seed{seed}", args.steps, seed, flags))
            print(f"seed {seed}, {mode}: {rewards[mode][-1]}", flush=True)
    found = {mode: _summary(runs, rewards["synchronous"]) for mode, runs in rewards.items()}
    print(json.dumps(found, indent=1))
    write_results(args.output, args, {"flags": {m: [*COMMON, *f] for m, f in MODES.items()}, "modes": found})


def _run(folder: Path, steps: int, seed: int, flags: tuple[str, ...]) -> dict[str, float]:
    """Held-out reward ``before`` and ``after``, its standard error, and the mean staleness of the second half of the
    steps."""
    metrics = quickstart(folder, steps, seed, ("--smoke",), (*COMMON, *flags))
    rows = rows_of(metrics, names.KIND_TRAIN)
    staleness = [row.get(names.STALENESS_MEAN, 0.0) for row in rows[len(rows) // 2 :]]
    return {
        **before_and_after(metrics),
        "stderr": rows_of(metrics, names.KIND_EVAL)[-1][f"{HELD_OUT}_stderr"],
        "staleness": statistics.fmean(staleness),
    }


def _summary(runs: list[dict[str, float]], synchronous: list[dict[str, float]]) -> dict[str, Any]:
    """Means over seeds with their standard errors, and the paired difference from the synchronous runs."""
    after = [run["after"] for run in runs]
    pairs = [run["after"] - other["after"] for run, other in zip(runs, synchronous, strict=True)]
    many = len(runs) ** 0.5
    return {
        "runs": runs,
        "mean": statistics.fmean(after),
        "standard_error": statistics.stdev(after) / many,
        "difference": statistics.fmean(pairs),
        "difference_standard_error": statistics.stdev(pairs) / many,
    }


if __name__ == "__main__":
    main()
