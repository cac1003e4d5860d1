"""``benchmark layers``: decoder layers of a given shape with random weights, bfloat16 against each FP8 recipe, on one device.

FLOP/s count products alone (a backward pass has twice a forward's); MFU is over the rate of a big square bfloat16 product
in the same run. On a CUDA host FP8 is Transformer Engine's; elsewhere it is emulated, which tells nothing of its speed.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.report.results import write_results

# Of a preset: weights, gradients and optimizer states of four precisions, 18 bytes a parameter, take at most 70 GB.
_LAYERS = {"tiny": 2, "3b": 4, "7b": 4, "32b": 2}


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "layers", help="a stack of decoder layers on Megatron, BF16 against each FP8 recipe", description=__doc__
    )
    parser.add_argument(
        "--shape",
        nargs="+",
        default=["7b", "32b"],
        metavar="NAME",
        help="tiny, 3b, 7b or 32b (Qwen2.5's widths), or a Hugging Face config.json (default: 7b 32b)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="(default: 4; 2 of tiny and 32b)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--sequence-length", type=int, default=2048, help="(default: %(default)s)")
    parser.add_argument("--micro-batches", type=int, default=4, help="of a step (default: %(default)s)")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="(default: all)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--repeat", type=int, default=7, help="timed repetitions (default: %(default)s)")
    parser.add_argument(
        "--matrix", type=int, default=8192, metavar="N", help="side of the square product (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    for flag in ("repeat", "sequence_length", "micro_batches", "matrix"):
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1.")
    if args.sequence_length < 2:
        raise UsageError(f"--sequence-length is {args.sequence_length}; a sequence of one token predicts none.")
    if args.tokens < 1 or args.tokens % args.sequence_length:
        raise UsageError(f"--tokens {args.tokens} is no multiple of --sequence-length {args.sequence_length}.")

    from openrlhf_gtpo.benchmarks.model_configs import read_shape

    layers = {name: args.layers if args.layers is not None else _LAYERS.get(name, 4) for name in args.shape}
    shapes = {name: read_shape(name, number) for name, number in layers.items()}

    from openrlhf_gtpo import platform
    from openrlhf_gtpo.benchmarks.layers import Work, derived, measure
    from openrlhf_gtpo.benchmarks.precisions import precisions
    from openrlhf_gtpo.platform.processes import LaunchError, run_processes

    work = Work(args.tokens, args.sequence_length, args.micro_batches, args.matrix, args.recompute)
    cases = []
    for name, shape in shapes.items():
        chosen, absent = precisions(args.recipes, shape, cuda=platform.detect() == "cuda")
        try:
            case = run_processes(measure, 1, shape, chosen, work, args.repeat, args.seed)
        except LaunchError as error:
            raise UsageError(str(error)) from error
        case |= {"shape": name, "config": shape.to_dict(), "absent": absent, "derived": derived(case)}
        cases.append(case)
        _print(case, args.repeat)
        if args.output:  # the next shape may not fit into memory
            write_results(args.output, args, {"cases": cases})


def _print(case: dict[str, Any], repeat: int) -> None:
    best = statistics.median(case["matrix"]["flops_per_second"]) / 1e12
    print(
        f"\n{case['config']['num_hidden_layers']} layers of {case['shape']} ({case['layers']}), {case['tokens']} tokens a "
        f"step; medians of {repeat}; {case['matrix']['dtype']} product of {case['matrix']['side']}: {best:.2f} TFLOP/s"
    )
    print(
        f"{'precision':24}{'phase':18}{'tokens/s':>12}{'x bf16':>8}{'from - to':>14}{'TFLOP/s':>10}{'MFU':>7}{'GB':>7}"
    )
    for name, one in case["measured"].items():
        if one["failure"]:
            print(f"{name:24}not measured: {one['failure']}")
            continue
        label = f"{name} ({one['fp8'].split()[0]})" if one["fp8"] else name
        memory = "?" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**30:.1f}"
        for phase, numbers in case["derived"][name].items():
            cells = f"{label:24}{phase:18}{statistics.median(numbers['tokens_per_second']):12,.0f}"
            times = numbers["times_bf16"]
            cells += f"{statistics.median(times):8.2f}{f'{min(times):.2f} - {max(times):.2f}':>14}"
            rate = statistics.median(numbers["flops_per_second"]) / 1e12
            print(f"{cells}{rate:10.2f}{numbers['mfu']:7.1%}{memory:>7}")
    for name, reason in case["absent"].items():
        print(f"{name:24}absent: {reason}")
