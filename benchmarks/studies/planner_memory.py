"""Compares the planner's memory of a train step with real Megatron actors on gloo processes, rank by rank, for the
layouts of tests/tools/planner/test_training_memory.py.

    python3 -m benchmarks.studies.planner_memory --output benchmarks/results/planner_memory.json   two minutes, no GPU
"""

from pathlib import Path
from typing import Any

from benchmarks.suite.results import write_results
from openrlhf_gtpo.cli import Parser
from tests.support.rank_pool import RankPool
from tests.tools.planner.test_training_memory import SEEN, UNSEEN, measured_and_planned


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write every rank's bytes to this JSON file")
    args = parser.parse_args()
    layouts: dict[str, list[dict[str, Any]]] = {}
    with RankPool(1) as one_rank, RankPool(4) as four_ranks:
        for name, case in (SEEN | UNSEEN).items():
            ranks = measured_and_planned(case, one_rank if case.world == 1 else four_ranks)
            layouts[name] = [{"measured": measured, "planned": planned} for measured, planned in ranks]
            errors = [sum(planned.values()) / sum(measured.values()) - 1 for measured, planned in ranks]
            most = max(sum(measured.values()) for measured, _ in ranks)
            print(f"{name:30}{most / 2**20:8.0f} MiB{min(errors):+8.1%} to {max(errors):+.1%}", flush=True)
    write_results(args.output, args, {"layouts": layouts, "unseen": list(UNSEEN)})


if __name__ == "__main__":
    main()
