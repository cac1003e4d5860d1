"""`python3 -m openrlhf_gtpo.cli.report {run,compare,page,watch}`: tables, plots and pages of runs.

Reads the metrics files that training writes.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.files import check_output, replace_text
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs

_NEXT = """
The model is in {model}. Ask it, from {here}, with {environment} active:
  python3 -m openrlhf_gtpo.cli.ask {model} {question}
Load it: AutoModelForCausalLM.from_pretrained({text!r}) in Transformers, vllm serve {model} in vLLM.
Which token was paid, and why, as a page to open in a browser:
  python3 -m openrlhf_gtpo.cli.view {run} --output {page}"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return 0, 2 after a sentence on stderr for a user error, 1 if a process failed."""
    args = build_parser().parse_args(argv)
    return exit_status(f"report {args.command}", lambda: args.run(args), ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="one run: held-out reward before and after, time per step, curves")
    add = run.add_argument
    add("metrics", type=Path, metavar="DIR_OR_FILE", help="metrics file, or folder with metrics.jsonl")
    add("--png", type=Path, metavar="OUT", help="draw reward, entropy and response length (default: DIR/curves.png)")
    add("--title", help="title of the PNG (default: the run's path)")
    add(
        "--model",
        type=Path,
        metavar="DIR",
        help="folder of the trained model; also print commands to ask, load and view it",
    )
    add("--question", default="...", help="question in the printed command")
    run.set_defaults(run=_run)

    compare = commands.add_parser("compare", help="several runs: a markdown table, with means over a label's runs")
    add = compare.add_argument
    add("runs", nargs="+", metavar="LABEL=FILE", help="metrics of a run; the seeds of one method share a label")
    add("--png", type=Path, metavar="OUT", help="also draw the runs and their means")
    add("--title", default="", help="title of the PNG")
    add("--markdown", type=Path, metavar="OUT", help="also write the table to this file")
    compare.set_defaults(run=_compare)

    page = commands.add_parser("page", help="several runs as one HTML page: figures, baseline, means, settings")
    add = page.add_argument
    runs_help = "LABEL=FILE or LABEL=DIR of a run (DIR may be a TensorBoard folder), or the folder of an experiment"
    add("runs", nargs="+", metavar="RUN", help=runs_help)
    add("--baseline", metavar="LABEL", help="label that the others are compared with, over seeds and questions")
    add("--output", required=True, type=Path, metavar="DIR", help="folder for index.html and figures (PNG, SVG)")
    add("--title", help="title of the page (default: the runs' labels)")
    page.set_defaults(run=_page)

    watch = commands.add_parser("watch", help="progress bar of a running training")
    add = watch.add_argument
    add("metrics", type=Path, metavar="DIR_OR_FILE", help="metrics file or folder, which need not exist yet")
    add("--steps", type=int, required=True, help="total training steps of the run")
    add("--pid", type=int, required=True, help="training process; watching ends with it")
    watch.set_defaults(run=_watch)
    return parser


def _run(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import print_run_summary

    folder = args.metrics.is_dir()
    png = args.png or (args.metrics / "curves.png" if folder else None)
    check_output("--png", png, args.metrics / "metrics.jsonl" if folder else args.metrics)
    runs = [rows for rows in read_runs(args.metrics) if any(row["kind"] != names.KIND_RUN for row in rows)]
    if not runs:
        raise UsageError(f"{args.metrics} has no step yet; wait for the first one.")
    for number, metrics in enumerate(runs, start=1):
        if len(runs) > 1:
            print(f"{args.metrics}: run {number} of {len(runs)}")
        print_run_summary(metrics)
    if png:
        from openrlhf_gtpo.report.curves import plot_comparison, plot_run

        title = args.title or str(args.metrics)
        if len(runs) == 1:
            print(plot_run(runs[0], png, title))
        else:
            print(plot_comparison({f"run {i}": [rows] for i, rows in enumerate(runs, start=1)}, png, title))
    if args.model:
        folder = args.metrics if args.metrics.is_dir() else args.metrics.parent
        paths = {"model": args.model, "question": args.question, "run": folder, "page": folder / "view.html"}
        quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
        environment = Path(os.environ.get("VIRTUAL_ENV", "the environment")).name
        print(_NEXT.format(here=Path.cwd(), environment=environment, text=str(args.model), **quoted))


def _compare(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import comparison_markdown

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    inputs: set[tuple[str, Path]] = set()
    # Read each label's runs, and check that no output replaces an input.
    for text in args.runs:
        label, separator, path = text.partition("=")
        if not (label and separator and path):
            raise ValueError(f"{text!r} is not LABEL=FILE: write it as gtpo={text.strip('=') or 'metrics.jsonl'}")
        if label.startswith("_"):
            raise UsageError(f"Legends leave out labels that begin with _, such as {label!r}; rename it.")
        for flag, output in (("--png", args.png), ("--markdown", args.markdown)):
            check_output(flag, output, Path(path), Path(path, "metrics.jsonl"))
        if (label, Path(path).resolve()) in inputs:
            raise UsageError(f"{label} has {path} twice; name it once.")
        inputs.add((label, Path(path).resolve()))
        *earlier, last = read_runs(path)
        # The last run may still be running. An earlier one without its last line was restarted with the same seed.
        finished = [rows for rows in earlier if rows[0]["kind"] != names.KIND_RUN or rows[-1].get("ended")]
        if len(finished) < len(earlier):
            left_out = f"{len(earlier) - len(finished)} of {len(earlier) + 1} runs, which did not finish"
            print(f"{path}: left out {left_out}.", file=sys.stderr)
        runs.setdefault(label, []).extend([*finished, last])
    if args.png and args.markdown and args.png.resolve() == args.markdown.resolve():
        raise UsageError(f"--png and --markdown are both {args.png}; name two files.")
    # Print, write and draw the comparison.
    table = comparison_markdown(runs)
    print(table, end="")
    if args.markdown:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        replace_text(args.markdown, table)
    if args.png:
        from openrlhf_gtpo.report.curves import plot_comparison

        print(plot_comparison(runs, args.png, args.title))


def _page(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.tools.experiment.page import find_runs, write_page

    check_output("--output", args.output / "index.html")
    runs, unfinished = find_runs(args.runs)
    page, verdict = write_page(runs, args.output, args.title or ", ".join(runs), args.baseline, unfinished)
    print(*verdict, page, sep="\n")


def _watch(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.watch import process_runs, watch

    path = args.metrics / "metrics.jsonl" if args.metrics.is_dir() else args.metrics
    watch(path, args.steps, lambda: process_runs(args.pid))


if __name__ == "__main__":
    sys.exit(main())
