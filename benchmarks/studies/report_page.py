"""Measures how often the intervals of `report page` cover the true effect, and times a page of 100 runs of 1000 steps.

    python3 -m benchmarks.studies.report_page --output docs/results/report_page.json

The runs are copies of a quickstart run, with its metrics at every step. For comparison there are percentile intervals
of a hierarchical bootstrap, which draws seeds and, in each, questions.
"""

import json
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.cli.report import main as report
from tests.support.simulated import EFFECT, SCENARIOS, coverage, draw

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "docs" / "results" / "quickstart" / "runs.tar.xz"


def percentile_coverage(scenario: str, seeds: int, questions: int, repetitions: int, resamples: int = 400) -> float:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(repetitions):
        differences = draw(random, scenario, seeds, questions)
        rows = random.integers(seeds, size=(resamples, seeds, 1))
        columns = random.integers(questions, size=(resamples, seeds, questions))
        low, high = np.percentile(differences[rows, columns].mean(axis=(1, 2)), [2.5, 97.5])
        covered += low <= EFFECT <= high
    return covered / repetitions


def seconds_of_page(runs: int, steps: int) -> float:
    with tarfile.open(RUNS) as archive:
        metrics = archive.extractfile("gtpo-seed1.jsonl")
        assert metrics is not None
        sample = [json.loads(line) for line in metrics]
    train = next(row for row in sample if row["kind"] == "train")
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = []
        for run in range(runs):
            path = Path(folder, f"{run}.jsonl")
            lines = [{"kind": "run", "step": 0, "time": 0.0, "seed": run // 10}]
            for step in range(1, steps + 1):
                lines.append(
                    {
                        name: value * random.uniform(0.9, 1.1)
                        for name, value in train.items()
                        if name != "kind" and isinstance(value, float)
                    }
                    | {"kind": "train", "step": step}
                )
                if step % 50 == 0:
                    best = {f"eval_math_pass{k}": random.random() for k in (1, 16, 32)}
                    lines.append({"kind": "eval", "step": step, "time": 1.0, **best})
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            arguments.append(f"method{run % 10}={path}")
        start = time.perf_counter()
        assert report(["page", *arguments, "--baseline", "method0", "--output", f"{folder}/page"]) == 0
        return time.perf_counter() - start


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=10_000, help="draws of each case")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    seconds = seconds_of_page(args.runs, args.steps)
    print(f"{args.runs} runs of {args.steps} steps: {seconds:.1f} s")
    cases = []
    for scenario in (*SCENARIOS, "answers"):
        for seeds in (3, 5):
            for questions in (30, 100):
                case = {"scenario": scenario, "seeds": seeds, "questions": questions}
                case["coverage"] = coverage(scenario, seeds, questions, args.repetitions)
                case["percentile_bootstrap"] = percentile_coverage(scenario, seeds, questions, args.repetitions // 20)
                print(*case.values())
                cases.append(case)
    write_results(args.output, args, {"page_seconds": seconds, "cases": cases})


if __name__ == "__main__":
    main()
