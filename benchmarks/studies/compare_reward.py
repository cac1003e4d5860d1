"""GTPO whose shares compare a response's tokens beside GTPO and GRPO: the smoke quickstart's model and task, longer.

    python3 -m benchmarks.studies.compare_reward --output FILE                     twenty minutes on two cores

Runs that are there are kept: start it again to go on.
"""

from pathlib import Path
from statistics import fmean, stdev

from benchmarks.studies.quickstart_runs import HELD_OUT, quickstart, rows_of
from benchmarks.suite.harness import print_table
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.platform.results import write_results
from openrlhf_gtpo.report import names

METHODS: dict[str, tuple[str, ...]] = {  # as in examples/experiments/study.yaml
    "gtpo_response": ("--algo.gtpo.compare", "response"),
    "gtpo": (),
    "group_norm": ("--algo.advantage.estimator", "group_norm", "--actor.eps_clip_low_high", "0.2", "0.28"),
}
FLAGS = ("--eval.n_samples_per_prompt", "16", "--ckpt.save_steps", "-1", "--logger.dump_rollouts", "0")


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--steps", type=int, default=80, metavar="N", help="of each run (default: 80)")
    parser.add_argument("--seeds", type=int, default=7, metavar="N", help="1 to N (default: 7)")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare_reward"), metavar="DIR", help="where runs go")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures to this JSON file")
    args = parser.parse_args()
    reward: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for seed in range(1, args.seeds + 1):
        for name, flags in METHODS.items():
            folder = args.runs / f"{name}-seed{seed}"
            metrics = quickstart(folder, args.steps, seed, ("--smoke",), (*FLAGS, *flags))
            first, *_, last = rows_of(metrics, names.KIND_EVAL)
            trained = [row["reward"] for row in rows_of(metrics, names.KIND_TRAIN)]
            reward[name].append(
                {"before": first[HELD_OUT], "after": last[HELD_OUT], "training": fmean(trained[len(trained) // 2 :])}
            )
            print(f"seed {seed}, {name}: {reward[name][-1]}", flush=True)
    rows = []
    for name, runs in reward.items():
        pairs = [run["after"] - other["after"] for run, other in zip(reward["gtpo_response"], runs, strict=True)]
        columns = [[run[key] for run in runs] for key in ("before", "after", "training")]
        cells = [f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}" for values in (*columns, pairs)]
        rows.append([name, *cells])
    columns_named = ["method", "held out, before", "after", "training, second half", "gtpo_response less this"]
    print_table("reward, mean ± standard error", columns_named, rows)
    write_results(args.output, args, {"flags": {n: [*FLAGS, *f] for n, f in METHODS.items()}, "runs": reward})


if __name__ == "__main__":
    main()
