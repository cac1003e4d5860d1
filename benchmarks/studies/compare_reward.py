"""Compares GTPO with shares within a response, GTPO and GRPO: the smoke quickstart's model and task, longer.

    python3 -m benchmarks.studies.compare_reward --output FILE                     twenty minutes on two cores

Finished runs are kept: run it again to continue.
"""

from statistics import fmean, stdev

from benchmarks.studies.quickstart_runs import before_and_after, quickstart, rows_of, study_parser
from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.report import names

METHODS: dict[str, tuple[str, ...]] = {  # as in examples/experiments/study.yaml
    "gtpo_response": ("--algo.gtpo.compare", "response"),
    "gtpo": (),
    "group_norm": ("--algo.advantage.estimator", "group_norm", "--actor.eps_clip_low_high", "0.2", "0.28"),
}
FLAGS = ("--eval.n_samples_per_prompt", "16", "--ckpt.save_steps", "-1", "--logger.dump_rollouts", "0")


def main() -> None:
    args = study_parser(__doc__, "compare_reward", steps=80, seeds=7).parse_args()
    reward: dict[str, list[dict[str, float]]] = {name: [] for name in METHODS}
    for seed in range(1, args.seeds + 1):
        for name, flags in METHODS.items():
            folder = args.runs / f"{name}-seed{seed}"
            metrics = quickstart(folder, args.steps, seed, ("--smoke",), (*FLAGS, *flags))
            trained = [row["reward"] for row in rows_of(metrics, names.KIND_TRAIN)]
            reward[name].append({**before_and_after(metrics), "training": fmean(trained[len(trained) // 2 :])})
            print(f"seed {seed}, {name}: {reward[name][-1]}", flush=True)
    rows = []
    for name, runs in reward.items():
        pairs = [run["after"] - other["after"] for run, other in zip(reward["gtpo_response"], runs, strict=True)]
        columns = [[run[key] for run in runs] for key in ("before", "after", "training")]
        cells = [f"{fmean(values):.3f} ± {stdev(values) / len(values) ** 0.5:.3f}" for values in (*columns, pairs)]
        rows.append([name, *cells])
    columns_named = ["method", "held out, before", "after", "training, second half", "gtpo_response minus this"]
    print_table("reward, mean ± standard error", columns_named, rows)
    write_results(args.output, args, {"flags": {n: [*FLAGS, *f] for n, f in METHODS.items()}, "runs": reward})


if __name__ == "__main__":
    main()
