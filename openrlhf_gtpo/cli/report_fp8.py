"""``report fp8``: what FP8 does to entropies, shares and advantages of given responses, without training.

Scores the same responses without FP8 and with each recipe on the Megatron actor, shapes their rewards both ways, and
compares. Input, a JSON object on each line: {"prompt": ..., "response": ..., "reward": NUMBER} or {"tokens": [...], "group":
NAME, "reward": NUMBER}; lines with the same prompt or group are a group.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ESTIMATORS = ("gtpo", "grpo_s")


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    from openrlhf_gtpo.integration.command_line.megatron_flags import add_layout_flags
    from openrlhf_gtpo.megatron.fp8.options import MODES, RECIPES

    parser = commands.add_parser(
        "fp8", help="what FP8 does to entropy credit: a table, a page with plots, JSON", description=__doc__
    )
    parser.add_argument("--model", required=True, metavar="DIR", help="folder of a Hugging Face checkpoint")
    parser.add_argument("--input", required=True, type=Path, metavar="FILE", help="JSON lines")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="gets fp8.md, fp8.png and fp8.json")
    parser.add_argument("--estimator", choices=_ESTIMATORS, default=_ESTIMATORS[0], help="(default: %(default)s)")
    parser.add_argument("--megatron.fp8", choices=MODES, default="emulated", help="(default: %(default)s)")
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="(default: all that there are)"
    )
    parser.add_argument(
        "--layers_in_bf16",
        type=int,
        default=0,
        metavar="N",
        help="compare tensorwise and blockwise also with the first N and the last N layers left in BF16",
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of the policy (default: %(default)s)")
    parser.add_argument(
        "--max-tokens",
        "--max_tokens",
        type=int,
        default=8192,
        metavar="N",
        help="of a micro-batch (default: %(default)s)",
    )
    add_layout_flags(parser.add_argument_group("layout"))
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    from openrlhf_gtpo import platform
    from openrlhf_gtpo.errors import UsageError
    from openrlhf_gtpo.integration.command_line import megatron_flags
    from openrlhf_gtpo.megatron.fp8.options import Fp8Options

    platform.choose()

    from openrlhf_gtpo.algorithms import ESTIMATORS
    from openrlhf_gtpo.integration.command_line.guard import check_openrlhf
    from openrlhf_gtpo.integration.credit.entropy_credit import EntropyCredit
    from openrlhf_gtpo.report.fp8_page import table, verdict, write_page
    from openrlhf_gtpo.report.results import write_results
    from openrlhf_gtpo.scoring import checks as score_checks
    from openrlhf_gtpo.scoring.fp8_report import compare, read_credit
    from openrlhf_gtpo.scoring.models import ScoreModel

    check_openrlhf()
    flags = {name.split(".")[1]: value for name, value in vars(args).items() if name.startswith("megatron.")}
    mode = flags.pop("fp8")
    if args.layers_in_bf16 < 0:
        raise UsageError(f"Expected --layers_in_bf16 >= 0, got {args.layers_in_bf16}.")
    candidates = {recipe: Fp8Options(mode, recipe) for recipe in args.recipes}
    if args.layers_in_bf16:
        n = args.layers_in_bf16
        some = [recipe for recipe in args.recipes if recipe != "delayed"]  # which has all layers or none
        candidates |= {f"{recipe}, {n} + {n} layers in BF16": Fp8Options(mode, recipe, n, n) for recipe in some}
    layout = megatron_flags.layout_of(SimpleNamespace(megatron=SimpleNamespace(**flags)))
    model = ScoreModel(
        folder=args.model,
        backend="megatron",
        layout=layout,
        temperature=args.temperature,
        max_tokens=args.max_tokens,
    )
    if args.output.exists() and not args.output.is_dir():
        raise UsageError(f"--output {args.output} is a file; name a folder.")
    args.output.mkdir(parents=True, exist_ok=True)
    page = args.output / "fp8.json"
    processes = layout.model_parallel_size
    for fp8 in candidates.values():
        source = score_checks.check(replace(model, fp8=fp8), args.input, page, processes)
    for _ in source.rows():  # a line that is wrong is named before anything starts
        pass
    credit = read_credit(args.input)
    estimator = EntropyCredit(args.estimator, ESTIMATORS[args.estimator].config())
    results = compare(model, source, processes, candidates, estimator, credit)
    write_results(page, args, results)
    about = (
        f"{results['rows']} responses with {results['tokens']} tokens, credited by {args.estimator}; each recipe "
        f"(`--megatron.fp8 {mode}`) against the same model in BF16."
    )
    print(table(results))
    print(verdict(results))
    print(write_page(results, args.output, about))
