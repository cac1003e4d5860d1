"""`python3 -m openrlhf_gtpo.cli.report {run,compare,watch,fp8}`: what a training run did, as a table, a PNG and markdown.

Reads the metrics files that training writes; `fp8` takes responses and a model. Parse, check, call; nothing else.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli import report_fp8
from openrlhf_gtpo.platform.processes import ProcessFailed
from openrlhf_gtpo.report.metrics import read_metrics


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; 0, 2 after one sentence on stderr where the input cannot be used, or 1 where a process failed."""
    args = build_parser().parse_args(argv)
    try:
        args.run(args)
    except (ValueError, OSError, ProcessFailed) as error:
        print(f"report {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, ProcessFailed) else 2
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m openrlhf_gtpo.cli.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="one run: held-out reward before and after, time per step, curves")
    run.add_argument(
        "metrics", type=Path, metavar="DIR_OR_FILE", help="a metrics file, or a directory with metrics.jsonl"
    )
    run.add_argument("--png", type=Path, metavar="OUT", help="also draw reward, entropy and response length")
    run.add_argument("--title", help="of the PNG (default: the run's path)")
    run.set_defaults(run=_run)

    compare = commands.add_parser("compare", help="several runs: a markdown table, with means over a label's runs")
    compare.add_argument(
        "runs", nargs="+", metavar="LABEL=FILE", help="repeat a label for several seeds: gtpo=a.jsonl gtpo=b.jsonl"
    )
    compare.add_argument("--png", type=Path, metavar="OUT", help="also draw the runs and their means")
    compare.add_argument("--title", default="", help="of the PNG")
    compare.add_argument("--markdown", type=Path, metavar="OUT", help="also write the table to this file")
    compare.set_defaults(run=_compare)

    watch = commands.add_parser("watch", help="a progress bar over a run that is under way")
    watch.add_argument("metrics", type=Path, metavar="FILE", help="the run's metrics file; it may not exist yet")
    watch.add_argument("--steps", type=int, required=True, help="training steps of the whole run")
    watch.add_argument("--pid", type=int, required=True, help="the training process; watching ends with it")
    watch.set_defaults(run=_watch)
    report_fp8.add(commands)
    return parser


def _run(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import print_run_summary

    metrics = read_metrics(args.metrics)
    print_run_summary(metrics)
    if args.png:
        from openrlhf_gtpo.report.curves import plot_run

        print(plot_run(metrics, args.png, args.title or str(args.metrics)))


def _compare(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import comparison_markdown

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    for text in args.runs:
        label, separator, path = text.partition("=")
        if not (label and separator and path):
            raise ValueError(f"{text!r} is not LABEL=FILE: write it as gtpo={text.strip('=') or 'metrics.jsonl'}")
        runs.setdefault(label, []).append(read_metrics(path))
    table = comparison_markdown(runs)
    print(table, end="")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(table, encoding="utf-8")
    if args.png:
        from openrlhf_gtpo.report.curves import plot_comparison

        print(plot_comparison(runs, args.png, args.title))


def _watch(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.watch import watch

    watch(args.metrics, args.steps, args.pid)


if __name__ == "__main__":
    sys.exit(main())
