"""Measures how far a Megatron trainer is from the engine that sampled: with its own routes, with the engine's, and
with the previous token's routes; and the same for `cli.score`, with its own routes.

    python3 -m benchmarks.studies.routing_distance --model DIR --output docs/results/moe/NAME.json

Runs without CUDA. vLLM samples in bf16 from the mixture of experts in DIR, with at least 96 tokens. Megatron computes
the same rows in bf16 on four processes.
"""

import json
import math
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.studies.family_scores import score
from benchmarks.suite.results import write_results
from openrlhf_gtpo import platform
from openrlhf_gtpo.cli import Parser
from tests.support.logits_program import several
from tests.support.moe_program import LAYOUTS
from tests.support.rank_pool import RankPool
from tests.support.routing_program import differences, log_probs

ROOT = Path(__file__).resolve().parents[2]
AT = ("TP1", "PP2xEP2", "TP2-SPxEP2")
SCORED = {
    "deepspeed": (),
    "megatron, TP2-SP × EP2": (
        *("--actor.backend", "megatron", "--megatron.tensor_model_parallel_size", "2", "--processes", "4"),
        *("--megatron.sequence_parallel", "--megatron.expert_model_parallel_size", "2"),
    ),
}


def figures(off: np.ndarray) -> dict[str, float]:
    """Statistics of Δ = log π of the trainer - log π of the sampler."""
    return {
        "mean": float(np.abs(off).mean()),
        "max": float(np.abs(off).max()),
        "k3": float((np.exp(off) - 1 - off).mean()),
        "far": float((np.abs(off) > math.log(2)).mean()),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python3 -m benchmarks.studies.routing_distance", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", required=True, type=Path)
    args = parser.parse_args(argv)
    platform.choose()
    results: dict[str, Any] = {"megatron": {}, "score": {}}
    with tempfile.TemporaryDirectory() as name, RankPool(4) as ranks:
        folder = Path(name)
        program = [sys.executable, "-m", "tests.support.routes_program", args.model, str(folder / "rows")]
        subprocess.run(program, check=True, cwd=ROOT)
        found = pickle.loads((folder / "rows").read_bytes())
        rows = [*found["plain"], *found["preempted"]]
        results["rows"], results["tokens"] = len(rows), sum(len(row[2]) for row in rows)
        groups = [rows[first : first + 4] for first in range(0, len(rows), 4)]
        batches = [[(row[0], row[3]) for row in group] for group in groups]
        shifted = [[(tokens, np.roll(routes, 1, axis=0)) for tokens, routes in batch] for batch in batches]
        for at in AT:
            calls = [
                (log_probs, (args.model, LAYOUTS[at], "bfloat16", given, replays))
                for given, replays in ((batches, False), (batches, True), (shifted, True))
            ]
            answers = ranks.run(several, LAYOUTS[at], calls)
            live, replayed, wrong = (figures(differences(rows, values)) for values, _ in answers[0])
            counts = np.sum([counts for rank in answers for _, counts in rank[1][1].values()], axis=0)
            results["megatron"][at] = {"live": live, "replayed": replayed, "token_before": wrong}
            results["megatron"][at]["flips"] = float(counts[1] / counts[0])
        for backend, flags in SCORED.items():
            scores = score(args.model, [[int(token) for token in row[0]] for row in rows], flags, folder)
            results["score"][backend] = figures(differences(rows, [np.array(scores["log_probs"])]))
    write_results(args.output, args, results)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
