"""`python3 -m openrlhf_gtpo.cli.report {run,compare,page,watch,fp8,mismatch}`: tables, plots and pages of runs.

Reads the metrics files that training writes; `fp8` takes responses and a model, `mismatch` a rollout dump and a model.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.cli.score import add_input_flags
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import MODES, RECIPES
from openrlhf_gtpo.platform.files import check_output, replace_text
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training.settings import megatron_flags

_FP8 = """Measures what FP8 does to entropies, shares and advantages of given responses, without training.

Scores the same responses without FP8 and with each recipe on the Megatron actor, shapes their rewards from both, and
compares the results. The input has a JSON object on each line: {"prompt": ..., "response": ..., "reward": NUMBER} or
{"tokens": [...], "group": NAME, "reward": NUMBER}; lines with the same prompt or group form a group.
"""

_MISMATCH = """Measures how far the values that a step was trained on are from the policy that sampled it.

Scores a dumped rollout with Transformers in BF16, at the rollout's temperature, and compares log-probs, entropies and
the dump's own entropy credit with what is in the dump: values of vLLM's sampler with `--rollout.entropy sampler`
(unless its audit's gate was closed), the actor's without. Rows of a guide have no values from the sampler, and are
left out then. The model must have the weights that sampled the rollout: for step 1, those that training began with.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand. Return 0, 2 after a sentence on stderr if the input is unusable, 1 if a process failed."""
    args = build_parser().parse_args(argv)
    return exit_status(f"report {args.command}", lambda: args.run(args), ValueError, OSError)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.report", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="one run: held-out reward before and after, time per step, curves")
    add = run.add_argument
    add("metrics", type=Path, metavar="DIR_OR_FILE", help="a metrics file, or a directory with metrics.jsonl")
    add("--png", type=Path, metavar="OUT", help="draw reward, entropy and response length (default: DIR/curves.png)")
    add("--title", help="title of the PNG (default: the run's path)")
    run.set_defaults(run=_run)

    compare = commands.add_parser("compare", help="several runs: a markdown table, with means over a label's runs")
    add = compare.add_argument
    add("runs", nargs="+", metavar="LABEL=FILE", help="repeat a label for several seeds: gtpo=a.jsonl gtpo=b.jsonl")
    add("--png", type=Path, metavar="OUT", help="also draw the runs and their means")
    add("--title", default="", help="title of the PNG")
    add("--markdown", type=Path, metavar="OUT", help="also write the table to this file")
    compare.set_defaults(run=_compare)

    page = commands.add_parser("page", help="any set of runs as one HTML page: figures, baseline, means, settings")
    add = page.add_argument
    runs_help = "a run, as LABEL=FILE or LABEL=DIR, also a TensorBoard folder; or the folder of an experiment"
    add("runs", nargs="+", metavar="RUN", help=runs_help)
    add("--baseline", metavar="LABEL", help="compare the others with this one, over seeds and questions")
    add("--output", required=True, type=Path, metavar="DIR", help="gets index.html, and each figure as PNG and SVG")
    add("--title", help="title of the page (default: the runs' labels)")
    page.set_defaults(run=_page)

    watch = commands.add_parser("watch", help="a progress bar over a run that is under way")
    add = watch.add_argument
    add("metrics", type=Path, metavar="FILE", help="the run's metrics file; it may not exist yet")
    add("--steps", type=int, required=True, help="training steps of the whole run")
    add("--pid", type=int, required=True, help="the training process; watching ends with it")
    watch.set_defaults(run=_watch)

    fp8_help = "what FP8 does to entropy credit: a table, a page with plots, JSON"
    fp8 = commands.add_parser("fp8", help=fp8_help, description=_FP8)
    add_input_flags(fp8)
    add = fp8.add_argument
    add("--output", required=True, type=Path, metavar="DIR", help="gets fp8.md, fp8.png and fp8.json")
    add("--estimator", default="gtpo", metavar="NAME", help="estimator of the entropy credit (default: gtpo)")
    add("--megatron.fp8", choices=MODES, default="emulated", help="FP8 mode of the products")
    add("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="recipes to compare (default: all)")
    add(
        "--layers-in-bf16",
        "--layers_in_bf16",  # its former name
        type=int,
        default=0,
        metavar="N",
        help="compare tensorwise and blockwise also with the first N and the last N layers left in BF16",
    )
    layout = fp8.add_argument_group("layout")
    for setting in megatron_flags.LAYOUT:
        setting.add_to(layout)
    fp8.set_defaults(run=_fp8)

    mismatch_help = "how far a rollout's log-probs and entropies are from a model's: a table"
    mismatch = commands.add_parser("mismatch", help=mismatch_help, description=_MISMATCH)
    add = mismatch.add_argument
    add("dump", type=Path, metavar="DUMP", help="a step_*.parquet of --logger.dump_rollouts")
    add("--model", required=True, metavar="DIR", help="folder of a Hugging Face checkpoint: the policy of that step")
    add("--max-tokens", type=int, default=8192, metavar="N", help="maximum tokens of a micro-batch")
    add("--json", type=Path, metavar="OUT", help="also write the numbers, with quantiles of the errors, to this file")
    mismatch.set_defaults(run=_mismatch)
    return parser


def _run(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import print_run_summary

    folder = args.metrics.is_dir()
    png = args.png or (args.metrics / "curves.png" if folder else None)
    check_output("--png", png, args.metrics / "metrics.jsonl" if folder else args.metrics)
    runs = [rows for rows in read_runs(args.metrics) if any(row["kind"] != names.KIND_RUN for row in rows)]
    if not runs:
        raise UsageError(f"{args.metrics} has no step yet.")
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


def _compare(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.summary import comparison_markdown

    runs: dict[str, list[list[dict[str, Any]]]] = {}
    inputs: set[tuple[str, Path]] = set()
    for text in args.runs:
        label, separator, path = text.partition("=")
        if not (label and separator and path):
            raise ValueError(f"{text!r} is not LABEL=FILE: write it as gtpo={text.strip('=') or 'metrics.jsonl'}")
        if label.startswith("_"):
            raise UsageError(f"Legends leave out a label that begins with _, such as {label!r}; name it otherwise.")
        for flag, output in (("--png", args.png), ("--markdown", args.markdown)):
            check_output(flag, output, Path(path), Path(path, "metrics.jsonl"))
        if (label, Path(path).resolve()) in inputs:
            raise UsageError(f"{label} has {path} twice; name it once.")
        inputs.add((label, Path(path).resolve()))
        *earlier, last = read_runs(path)
        # The last may still be running; an earlier one without its last line was started anew, with the same seed.
        finished = [rows for rows in earlier if rows[0]["kind"] != names.KIND_RUN or rows[-1].get("ended")]
        if len(finished) < len(earlier):
            left_out = f"{len(earlier) - len(finished)} of {len(earlier) + 1} runs, which did not finish"
            print(f"{path}: left out {left_out}.", file=sys.stderr)
        runs.setdefault(label, []).extend([*finished, last])
    if args.png and args.markdown and args.png.resolve() == args.markdown.resolve():
        raise UsageError(f"--png and --markdown are both {args.png}; name two files.")
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
    print(write_page(runs, args.output, args.title or ", ".join(runs), args.baseline, unfinished))


def _watch(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.watch import process_runs, watch

    if not 1 <= args.steps < 2**31:
        raise UsageError(f"Expected --steps >= 1 and below 2^31, got {args.steps}.")
    path = args.metrics / "metrics.jsonl" if args.metrics.is_dir() else args.metrics
    watch(path, args.steps, lambda: process_runs(args.pid))


def _fp8(args: argparse.Namespace) -> None:
    platform.choose()

    from openrlhf_gtpo.algorithms import ESTIMATORS
    from openrlhf_gtpo.algorithms.config import check_choice
    from openrlhf_gtpo.platform.results import write_results
    from openrlhf_gtpo.report.fp8_page import table, verdict, write_page
    from openrlhf_gtpo.scoring.fp8_report import compare, fp8_candidates, read_credit
    from openrlhf_gtpo.scoring.inputs import ScoreModel, check
    from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    from openrlhf.utils.config import hierarchize

    check_choice("--estimator", args.estimator, tuple(ESTIMATORS))
    mode = getattr(args, "megatron.fp8")
    candidates = fp8_candidates(mode, args.recipes, args.layers_in_bf16)
    layout = megatron_flags.layout_of(hierarchize(args))
    model = ScoreModel(args.model, "megatron", layout, temperature=args.temperature, max_tokens=args.max_tokens)
    page = args.output / "fp8.json"
    check_output("--output", page, args.input)
    args.output.mkdir(parents=True, exist_ok=True)
    processes = layout.model_parallel_size
    for fp8 in candidates.values():
        source = check(replace(model, fp8=fp8), args.input, page, processes)
    for _ in source.rows():  # a wrong line is reported before anything starts
        pass
    outcome, group_ids = read_credit(args.input)
    estimator = EntropyCredit(args.estimator, ESTIMATORS[args.estimator].config())
    results = compare(model, source, processes, candidates, estimator, outcome, group_ids)
    write_results(page, args, results)
    about = (
        f"{results['rows']} responses with {results['tokens']} tokens, credited by {args.estimator}; each recipe "
        f"(`--megatron.fp8 {mode}`) against the same model in BF16."
    )
    print(table(results))
    print(verdict(results))
    print(write_page(results, args.output, about))


def _mismatch(args: argparse.Namespace) -> None:
    from openrlhf_gtpo.report.rollouts import read_dump, vocabulary_digest

    # The dump, before the slow imports; its tokens must mean the same to the model.
    dump = read_dump(args.dump)
    columns, settings = dump.columns, dump.settings
    check_output("--json", args.json, args.dump)
    if columns["entropy"] is None or settings["config"] is None:
        raise UsageError(f"{args.dump} has no entropy credit to compare: its estimator is {settings['estimator']}.")
    platform.choose()

    import torch

    from openrlhf_gtpo.algorithms import ESTIMATORS
    from openrlhf_gtpo.platform.results import write_results
    from openrlhf_gtpo.report.fp8_page import table
    from openrlhf_gtpo.scoring.fp8_report import compare_rollout
    from openrlhf_gtpo.scoring.inputs import ScoreModel
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    vocabulary = settings.get("vocabulary")  # version 1 has none
    if vocabulary and vocabulary != vocabulary_digest(Model(args.model, "--model").tokenizer):
        raise UsageError(
            f"{args.dump} has token ids of {settings['model']}, which mean others to --model {args.model}."
        )
    name = settings["estimator"]
    estimator = EntropyCredit(name, ESTIMATORS[name].config(**settings["config"]))
    model = ScoreModel(args.model, temperature=settings["temperature"], max_tokens=args.max_tokens)
    # What the step was trained on, without the guide's rows if it is the sampler's.
    prompts, tokens, mask, *recorded = (
        columns[name].rows() for name in ("prompt_tokens", "tokens", "mask", "log_probs", "entropy")
    )
    source, left_out = "the actor", 0
    if settings["entropy"] == "sampler":
        source = "vLLM's sampler (or the actor, if the audit's gate was closed)"
        if columns["guided"] is not None:
            left_out = int(columns["guided"].sum())
            mask = [
                [action and not guided for action in row] for row, guided in zip(mask, columns["guided"], strict=True)
            ]
    outcome = torch.tensor(columns["outcome"], dtype=getattr(torch, settings["outcome_dtype"]))
    # Score it again, compare, and report.
    results = compare_rollout(
        model,
        list(zip(prompts, tokens, strict=True)),
        list(zip(*recorded, strict=True)),
        mask,
        estimator,
        outcome,
        torch.tensor(columns["group"]).long(),
    )
    if args.json:
        write_results(args.json, args, results)
    print(
        f"Step {dump.step}: {results['rows']} responses with {results['tokens']} tokens, credited by {name}; "
        f"log-probs and entropies of {source} against {args.model}."
    )
    if left_out:
        print(f"Rows of the guide, which the policy's sampler has not seen, are left out: {left_out}.")
    print(table(results), end="")


if __name__ == "__main__":
    sys.exit(main())
