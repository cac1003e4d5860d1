"""Trains the calculator agent for twenty steps: SmolLM2, products of two-digit numbers, both backends.

    python3 -m benchmarks.studies.agent_reward --output docs/results/agents/reward.json     an hour on two cores

Finished runs are kept: run it again to continue.
"""

import subprocess
import sys
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.studies.quickstart_runs import before_and_after, quickstart, rows_of, study_parser
from benchmarks.suite.harness import print_table
from benchmarks.suite.results import write_results
from openrlhf_gtpo.report import names

BACKENDS = ("deepspeed", "megatron")
TASK: tuple[str, ...] = (
    "--task",
    "products",
    "--task-config",
    '{"min_digits": 2, "max_digits": 2}',
    "--question-form",
    "{expression}",
)
TASK += ("--system", 'Use the calculator: write "calculate: 21 * 34", wait for the result, then say it.')
TASK += ("--example", "21 * 34", "calculate: 21 * 34", "--train-size", "400", "--eval-size", "24")
PROMPTS, SAMPLES = 4, 8
FLAGS: tuple[str, ...] = ("--train.agent_func_path", "examples/agents/calculator.py", "--data.label_key", "label")
FLAGS += ("--rollout.batch_size", str(PROMPTS), "--rollout.n_samples_per_prompt", str(SAMPLES))
FLAGS += ("--train.batch_size", str(PROMPTS * SAMPLES), "--rollout.max_new_tokens", "24", "--data.max_len", "256")
FLAGS += ("--eval.n_samples_per_prompt", "4", "--ckpt.save_steps", "-1", "--logger.dump_rollouts", "10")


def main() -> None:
    args = study_parser(__doc__, "agent_reward", steps=20, seeds=3).parse_args()
    data = args.runs / "data"
    subprocess.run([sys.executable, "-m", "openrlhf_gtpo.cli.prepare", "task", *TASK, "--output", data], check=True)
    flags = [*FLAGS, "--data.prompt_dataset", str(data / "train.jsonl"), "--eval.dataset", str(data / "eval.jsonl")]
    flags += ["--data.max_samples", str(args.steps * PROMPTS)]
    runs: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    for seed in range(1, args.seeds + 1):
        for backend, seeds in runs.items():
            folder = args.runs / f"{backend}-seed{seed}"
            seeds.append(_figures(quickstart(folder, args.steps, seed, ("--backend", backend), flags)))
            print(f"seed {seed}, {backend}: {seeds[-1]['before']:.3f} to {seeds[-1]['after']:.3f}", flush=True)
    rows = []
    for backend, seeds in runs.items():
        first, last = ([fmean(run["reward"][part]) for run in seeds] for part in (slice(5), slice(-5, None)))
        columns = [[run["before"] for run in seeds], [run["after"] for run in seeds], first, last]
        rows.append([backend, *(f"{fmean(values):.3f} ± {stdev(values):.3f}" for values in columns)])
    print_table("reward", ["backend", "held out, before", "after", "training, first five steps", "last five"], rows)
    write_results(args.output, args, {"flags": FLAGS, "task": TASK, "runs": runs})


def _figures(metrics: Path) -> dict[str, Any]:
    """Held-out reward ``before`` and ``after``, and each rollout's reward, turns, and questions to the calculator."""
    trained = rows_of(metrics, names.KIND_TRAIN)
    return before_and_after(metrics) | {key: [row[key] for row in trained] for key in ("reward", "turns", "asked")}


if __name__ == "__main__":
    main()
