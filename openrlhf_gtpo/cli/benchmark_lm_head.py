"""``benchmark lm-head``: log-probs and entropies from hidden states, every way that is installed, side by side.

The bare product is the limit: one for the forward pass, four for forward and backward (the logits twice, and the products
with their gradient), since no way keeps the logits. Gradients are those of the log-probs alone.
"""

import argparse
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.results import write_results

_DEFAULT_SHAPE = "1024x896x151936"
_DTYPES = ("bfloat16", "float16", "float32")


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "lm-head",
        help="log-probs and entropies: the bare product, OpenRLHF's way, other libraries', ours",
        description=__doc__,
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=[_DEFAULT_SHAPE],
        metavar="TxHxV",
        help="tokens x hidden width x vocabulary (default: %(default)s)",
    )
    parser.add_argument("--dtype", nargs="+", choices=_DTYPES, default=["bfloat16"], help="(default: %(default)s)")
    parser.add_argument(
        "--tensor-parallel",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="processes that share the vocabulary, one GPU each (default: %(default)s)",
    )
    parser.add_argument("--repeat", type=int, default=7, help="timed calls of each way (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")
    parser.add_argument(
        "--png", "--plot", type=Path, metavar="FILE", help="draw the times over the product's to this PNG file"
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    shapes = [_parse(text) for text in args.shape]
    if args.repeat < 1:
        raise UsageError(f"--repeat is {args.repeat}; it must be at least 1.")
    for ranks in args.tensor_parallel:
        if ranks < 1 or any(vocabulary % ranks for _, _, vocabulary in shapes):
            raise UsageError(f"--tensor-parallel {ranks} does not divide every vocabulary of --shape.")

    from openrlhf_gtpo.benchmarks.lm_head import PHASES, Shape, measure, ratios
    from openrlhf_gtpo.benchmarks.lm_head_ways import OURS, OURS_WITHOUT_ENTROPY
    from openrlhf_gtpo.platform.processes import LaunchError, run_processes

    cases = []
    for ranks in args.tensor_parallel:
        for dtype in args.dtype:
            for numbers in shapes:
                shape = Shape(*numbers, dtype)
                try:
                    result = run_processes(measure, ranks, shape, args.repeat, args.seed)
                except LaunchError as error:
                    raise UsageError(f"--tensor-parallel {ranks}: {error}") from error
                measured = result["measured"]
                over_product = {name: {phase: ratios(measured, phase, name) for phase in PHASES} for name in measured}
                case = {
                    "shape": asdict(shape),
                    "tensor_parallel": ranks,
                    "measured": {name: asdict(one) for name, one in measured.items()},
                    "over_product": over_product,
                    "entropy_on_over_off": {
                        phase: ratios(measured, phase, OURS, OURS_WITHOUT_ENTROPY) for phase in PHASES
                    },
                    "absent": result["absent"],
                }
                cases.append(case)
                _print(case, args.repeat)
    if args.output:
        write_results(args.output, args, {"cases": cases})
    if args.png:
        from openrlhf_gtpo.report.lm_head_plot import plot_lm_head

        print(f"wrote {plot_lm_head(cases, args.png)}")


def _parse(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise UsageError(f"--shape {text!r} is not TxHxV, such as {_DEFAULT_SHAPE}.")
    tokens, width, vocabulary = (int(number) for number in match.groups())
    return tokens, width, vocabulary


def _print(case: dict[str, Any], repeat: int) -> None:
    shape = case["shape"]
    print(
        f"\nT {shape['tokens']}, H {shape['width']}, V {shape['vocabulary']}, {shape['dtype']}, TP "
        f"{case['tensor_parallel']}; medians of {repeat} calls, product = 1; extra memory in MiB; errors in nats"
    )
    print(
        f"{'way':26}{'forward ms':>12}{'x':>7}{'MiB':>8}{'fwd+bwd ms':>13}{'x':>7}{'MiB':>8}{'log-prob':>11}{'entropy':>10}"
    )
    for name, one in case["measured"].items():
        cells = f"{name:26}"
        for phase, width in (("forward", 12), ("forward_backward", 13)):
            if phase in one["failure"]:
                cells += f"{'no memory':>{width}}{'':7}{'':8}"
                continue
            ratio = statistics.median(case["over_product"][name][phase])
            cells += f"{statistics.median(one['seconds'][phase]) * 1e3:{width}.1f}{ratio:7.2f}"
            extra = one["extra_bytes"][phase]
            cells += f"{'?':>8}" if extra is None else f"{extra / 2**20:8.0f}"
        for error, width in ((one["log_prob_error"], 11), (one["entropy_error"], 10)):
            cells += f"{'':{width}}" if error is None else f"{error:{width}.1e}"
        print(cells)
    costs = {phase: ratio for phase, ratio in case["entropy_on_over_off"].items() if ratio}
    texts = (f"{phase.replace('_', ' + ')} {statistics.median(ratio):.3f}" for phase, ratio in costs.items())
    print(f"ours with entropy over ours without: {', '.join(texts)}")
    for name, reason in case["absent"].items():
        print(f"{name:26}absent: {reason}")
