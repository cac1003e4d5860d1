"""``benchmark train``: the phases of real training steps, of one configuration or of several in turns.

Each run is the trainer itself, in a process of its own, with the flags behind ``--`` and those of its configuration; it is
ended after its last step. Every configuration is checked before the first run. Tokens are real ones, never padding. GPUs are
all that a run holds; on a CPU host a process that stands for a GPU counts as one. MFU is over the measured rate of a big
square product in the run's dtype, for FP8 too. With RAY_ADDRESS the runs use that cluster.
"""

import argparse
import signal
import statistics
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.results import write_results
from openrlhf_gtpo.report.step_phases import ratios, summary

_ONE = "this"  # the name of a configuration without --compare
_MATRIX = {"cuda": 8192, "cpu": 2048}


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "train",
        help="the phases of real training steps, of one configuration or several in turns",
        description=__doc__,
    )
    parser.add_argument("--steps", type=int, default=3, help="counted steps of a run (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each configuration (default: %(default)s)")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar='NAME="FLAGS"',
        help="a configuration: flags of the trainer on top of the common ones, which win over them. Give it twice or more; "
        "ratios are over the first",
    )
    parser.add_argument(
        "--matrix",
        type=int,
        metavar="N",
        help="side of the product that MFU is over (default: 8192; without CUDA 2048)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the phases, and the ratios")
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="new folder for logs and metrics, which every node of a cluster sees (default: runs/benchmark_train-TIME)",
    )
    parser.add_argument("trainer_flags", nargs="*", metavar="-- FLAG", help="flags of the trainer, for all")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    for flag, least in (("steps", 1), ("warmup", 0), ("repeat", 1), ("matrix", 1)):
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UsageError(f"--{flag} is {value}; it must be at least {least}.")
    if len(args.compare) == 1:
        raise UsageError(f"--compare {args.compare[0]!r} is alone; give a second one, or put its flags behind --.")

    from openrlhf_gtpo import platform
    from openrlhf_gtpo.benchmarks.train_configurations import configurations, new_folder, split_compare

    compare = split_compare(args.compare) or {_ONE: []}
    chosen = configurations(args.trainer_flags, compare, args.warmup + args.steps)
    folder = new_folder(args.runs or Path("runs") / f"benchmark_train-{datetime.now():%Y%m%d-%H%M%S}")

    from openrlhf_gtpo.benchmarks.train import measure

    # A terminated benchmark ends its trainer, as an interrupted one does.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    matrix = args.matrix or _MATRIX[platform.detect()]
    results = measure(chosen, args.steps, args.warmup, args.repeat, matrix, folder, _tell)
    rates = {gpus: statistics.median(rounds) for gpus, rounds in results["matrix"]["flops_per_second"].items()}
    derived: dict[str, Any] = {"summary": {}, "ratios": {}}
    measured = results["configurations"]
    for one in chosen:
        derived["summary"][one.name] = summary(measured[one.name]["runs"], rates[one.setup.gpus])
    for one in chosen[1:]:
        derived["ratios"][one.name] = ratios(measured[chosen[0].name]["runs"], measured[one.name]["runs"])
    results |= derived

    from openrlhf_gtpo.report.step_phases_table import print_step_phases

    print_step_phases(results)
    if args.output:
        write_results(args.output, args, results)
    if args.png:
        from openrlhf_gtpo.report.step_phases_plot import plot_step_phases

        print(plot_step_phases(results, args.png))
    _tell(f"logs and metrics: {folder}")


def _tell(text: str) -> None:
    print(f"[benchmark train] {text}", file=sys.stderr, flush=True)
