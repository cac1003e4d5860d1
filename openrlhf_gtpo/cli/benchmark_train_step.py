"""``benchmark train-step``: whole GTPO train steps of a model with random weights on Megatron, bfloat16 against FP8, and
on the DeepSpeed actor where OpenRLHF and DeepSpeed are installed.

Tokens are real ones, prompts included. Every precision gets a process of its own and the same batches, so that ratios are
step by step. On a CUDA host FP8 is Transformer Engine's; elsewhere it is emulated, which tells nothing of its speed.
"""

import argparse
import importlib.util
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli.benchmark_actor import trainer_argv
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.report.results import write_results

_DEEPSPEED = "deepspeed"
_NEEDED = ("openrlhf", "deepspeed", "ray")
_SIZES = ("prompts", "samples", "prompt_tokens", "response_tokens", "max_tokens", "micro_batch_size", "repeat")


def add(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "train-step", help="a whole GTPO train step, BF16 against FP8 against the DeepSpeed actor", description=__doc__
    )
    parser.add_argument(
        "--shape",
        default="3b",
        metavar="NAME",
        help="tiny, 3b, 7b or 32b (Qwen2.5's), or a Hugging Face config.json (default: %(default)s)",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own")
    parser.add_argument("--prompts", type=int, default=8, help="of a step (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="responses to each (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--response-tokens", type=int, default=2048, help="limit of a response (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=8192, help="of a micro-batch (default: %(default)s)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    parser.add_argument("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="(default: all)")
    parser.add_argument("--fp8-param", action="store_true", help="each recipe with FP8 primary weights too")
    parser.add_argument(
        "--deepspeed", action=argparse.BooleanOptionalAction, default=True, help="measure it where it is installed"
    )
    parser.add_argument("--micro-batch-size", type=int, default=4, help="rows, for DeepSpeed (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=3, help="counted steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    for flag in _SIZES:
        if getattr(args, flag) < 1:
            raise UsageError(f"--{flag.replace('_', '-')} is {getattr(args, flag)}; it must be at least 1.")
    if args.samples < 2:
        raise UsageError("--samples is 1; an advantage compares at least 2 responses to a prompt.")

    from openrlhf_gtpo import platform
    from openrlhf_gtpo.benchmarks.model_configs import read_shape
    from openrlhf_gtpo.benchmarks.precisions import BF16, precisions
    from openrlhf_gtpo.benchmarks.train_step import PHASES, Work, measure
    from openrlhf_gtpo.megatron.parallel.layout import LayoutError
    from openrlhf_gtpo.platform.processes import LaunchError, run_processes

    shape = read_shape(args.shape, args.layers)
    work = Work(args.prompts, args.samples, args.prompt_tokens, args.response_tokens, args.max_tokens, args.recompute)
    chosen, absent = precisions(args.recipes, shape, cuda=platform.detect() == "cuda", primary_weights=args.fp8_param)
    measured: dict[str, Any] = {}
    for name, fp8 in chosen.items():
        try:
            measured[name] = asdict(run_processes(measure, 1, shape, fp8, work, args.repeat, args.seed))
        except LaunchError as error:
            raise UsageError(str(error)) from error
        except (LayoutError, UsageError) as error:
            if name == BF16:  # what all others are compared with
                raise
            absent[name] = str(error)
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        absent[_DEEPSPEED] = f"not installed: {', '.join(missing)}"
    elif not args.deepspeed:
        absent[_DEEPSPEED] = "--no-deepspeed"
    else:
        measured[_DEEPSPEED] = _deepspeed(args, shape)
    derived = _derived(measured, BF16)
    _print(args, derived, absent, PHASES)
    if args.output:
        results = {"config": shape.to_dict(), "measured": measured, "derived": derived, "absent": absent}
        write_results(args.output, args, results)


def _deepspeed(args: argparse.Namespace, shape: Any) -> dict[str, Any]:
    """As of a precision; the advantages are computed elsewhere, and are no phase of this actor."""
    from openrlhf_gtpo.benchmarks.model_configs import write_random_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(shape, Path(folder), args.seed)
        argv = trainer_argv(
            folder,
            prompts=args.prompts,
            samples=args.samples,
            prompt_tokens=args.prompt_tokens,
            response_tokens=args.response_tokens,
            micro_batch_size=args.micro_batch_size,
            max_tokens=args.max_tokens,
        )
        from openrlhf_gtpo.benchmarks import actor as actor_benchmark

        backends = (_DEEPSPEED,)
        side = actor_benchmark.measure(
            argv, args.prompt_tokens, args.response_tokens, args.repeat, args.seed, backends
        )[_DEEPSPEED]
    return {
        "seconds": {"old_policy": side.forward, "train": side.train},
        "tokens": side.tokens,
        "peak_bytes": side.peak_bytes,
    }


def _derived(measured: dict[str, Any], base: str) -> dict[str, Any]:
    """Of each precision and phase, and of the whole ``step``: tokens/s of each step, and how many times as fast as
    bfloat16 on Megatron."""
    found: dict[str, Any] = {}
    for name, one in measured.items():
        phases = {**one["seconds"], "step": [sum(parts) for parts in zip(*one["seconds"].values(), strict=True)]}
        found[name] = {
            phase: {"tokens_per_second": [t / s for t, s in zip(one["tokens"], seconds, strict=True)]}
            for phase, seconds in phases.items()
        }
    for phases in found.values():
        for phase, numbers in phases.items():
            bf16 = found[base][phase]["tokens_per_second"]
            numbers["times_bf16"] = [a / b for a, b in zip(numbers["tokens_per_second"], bf16, strict=True)]
    return found


def _print(args: argparse.Namespace, derived: dict[str, Any], absent: dict[str, str], phases: tuple[str, ...]) -> None:
    print(f"\n{args.shape}: medians of {args.repeat} steps of {args.prompts} x {args.samples} responses, real tokens")
    print(f"{'':14}{'phase':14}{'tokens/s':>12}{'x bf16':>8}{'from - to':>14}")
    for name, numbers in derived.items():
        for phase in (*phases, "step"):
            if phase not in numbers:
                continue
            times = numbers[phase]["times_bf16"]
            cells = f"{name:14}{phase:14}{statistics.median(numbers[phase]['tokens_per_second']):12,.0f}"
            print(f"{cells}{statistics.median(times):8.2f}{f'{min(times):.2f} - {max(times):.2f}':>14}")
    for name, reason in absent.items():
        print(f"{name:14}absent: {reason}")
