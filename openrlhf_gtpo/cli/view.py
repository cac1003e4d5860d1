"""`python3 -m openrlhf_gtpo.cli.view RUN_OR_DUMP --output view.html`: shows which token was paid, and why, as one HTML
page.

Reads the dumps of `--logger.dump_rollouts`: one file, or all in a run's folder. Needs no model, GPU or network; the
page needs a browser. To show the difference, advantages are recomputed with each of `--estimators`: NAME, or
NAME:FIELD=VALUE:... with other settings, such as gtpo:variant=v1:compare=response.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.platform.files import check_output, replace_text


def main(argv: Sequence[str] | None = None) -> int:
    """Make the page. Return 0, or 2 after one sentence on stderr for a user error."""
    args = build_parser().parse_args(argv)
    return exit_status("view", lambda: _view(args), ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.view", description=__doc__)
    add = parser.add_argument
    add("source", type=Path, metavar="RUN_OR_DUMP", help="folder of a run, or one of its dumps")
    add("--output", required=True, type=Path, metavar="FILE", help="file for the page; it appears once complete")
    add("--estimators", metavar="A,B", default="", help="what to compare (default: the run's, gtpo and grpo_s)")
    add("--max-tokens", type=int, default=2_500_000, metavar="N", help="in the page; above that, groups are sampled")
    return parser


def _view(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.rollouts import find_dumps, read_dump
    from openrlhf_gtpo.tools.view.credit import read_methods
    from openrlhf_gtpo.tools.view.page import make_page

    files = find_dumps(args.source)
    check_output("--output", args.output, *files)
    dumps = sorted((read_dump(file) for file in files), key=lambda dump: dump.step)
    methods = read_methods([text for text in args.estimators.split(",") if text], dumps[-1])
    page, notes = make_page(dumps, methods, args.max_tokens)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    replace_text(args.output, page)
    for note in notes:
        print(note, file=sys.stderr)
    rows = sum(len(dump.columns["row"]) for dump in dumps)
    steps = f"{len(dumps)} step{'s' if len(dumps) > 1 else ''}"
    print(f"{args.output}: {rows} responses of {steps}, {len(page.encode()) / 1024:,.0f} KiB")


if __name__ == "__main__":
    sys.exit(main())
