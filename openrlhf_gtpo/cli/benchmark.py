"""``python3 -m openrlhf_gtpo.cli.benchmark NAME``: measurements whose numbers the documentation quotes.

A benchmark is its flags below, and ``run(args)`` in the file of ``openrlhf_gtpo/benchmarks/`` that has its name.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from openrlhf_gtpo.cli import Parser
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.megatron.fp8.options import RECIPES
from openrlhf_gtpo.platform.files import check_output
from openrlhf_gtpo.platform.processes import LaunchError, ProcessFailed

# Of the flags that take a number; of all others 1. An advantage compares at least two responses to a prompt.
_LEAST = {"warmup": 0, "bucket_mb": 0, "rows": 2, "samples": 2, "sequence_length": 2, "seed": -(2**31)}
_MOST = 2**31 - 1
_RECOMPUTE = ("none", "selective", "full")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark; 0, 2 after a sentence for a mistake in the command line, or 1 where a process failed."""
    parser = Parser(
        prog="python3 -m openrlhf_gtpo.cli.benchmark",
        description="Measurements whose numbers the documentation quotes.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (_overhead, _actor, _lm_head, _weight_sync, _layers, _train_step, _train):
        add(commands)
    args = parser.parse_args(argv)
    try:
        for name, value in vars(args).items():
            least = _LEAST.get(name, 1)
            for number in value if isinstance(value, list) else [value]:
                if type(number) is int and not least <= number <= _MOST:
                    limit = f">= {least}" if number < least else f"<= {_MOST}"
                    raise UsageError(f"Expected --{name.replace('_', '-')} {limit}, got {number}.")
        for name in ("output", "png"):  # what is measured must not be lost in the end
            check_output(f"--{name}", getattr(args, name, None))
        run(args)
    except (UsageError, LaunchError, TrainingStopped, ProcessFailed) as error:
        print(f"benchmark {args.command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingStopped | ProcessFailed) else 2
    return 0


def run(args: argparse.Namespace) -> None:
    """Run the benchmark that ``args`` names; from here on torch and what is measured are imported."""
    if args.command in ("overhead", "actor"):  # their files import OpenRLHF
        from openrlhf_gtpo import platform
        from openrlhf_gtpo.integration.command_line.guard import check_openrlhf
        from openrlhf_gtpo.integration.command_line.input_checks import check_model

        check_openrlhf()
        check_model(args.model, "--model")
        platform.choose()
    import_module(f"openrlhf_gtpo.benchmarks.{args.command.replace('-', '_')}").run(args)


def _command(commands: Any, name: str, summary: str, description: str = "") -> Callable[..., Any]:
    """Add a command; what is returned adds a flag to it."""
    return commands.add_parser(name, help=summary, description=description or summary).add_argument


def _output(flag: Callable[..., Any]) -> None:
    flag("--output", type=Path, metavar="FILE", help="write everything measured to this JSON file")


def _overhead(commands: Any) -> None:
    flag = _command(commands, "overhead", "a GTPO step against upstream's group_norm step, same batches")
    flag("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--prompts", type=int, default=8, help="prompts in a batch")
    flag("--samples", type=int, default=8, help="responses to each")
    flag("--prompt-tokens", type=int, default=48, help="of each prompt")
    flag("--response-tokens", type=int, default=32, help="limit of a response")
    flag("--micro-batch-size", type=int, default=16, help="rows")
    flag("--repeat", type=int, default=7, help="counted steps of each variant")
    _output(flag)


def _actor(commands: Any) -> None:
    flag = _command(commands, "actor", "the DeepSpeed actor against the Megatron actor, same ragged batches")
    flag("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--rows", type=int, default=32, help="responses in a batch")
    flag("--prompt-tokens", type=int, default=64, help="of each prompt")
    flag("--response-tokens", type=int, default=512, help="limit of a response")
    flag("--micro-batch-size", type=int, default=8, help="rows, for DeepSpeed")
    flag("--max-tokens", type=int, default=2048, help="of a micro-batch, for Megatron")
    flag("--repeat", type=int, default=5, help="counted batches")
    flag("--seed", type=int, default=1, help="of what is random")
    _output(flag)
    flag("trainer_flags", nargs="*", metavar="-- FLAG", help="further flags of the trainer, for both")


def _lm_head(commands: Any) -> None:
    flag = _command(
        commands,
        "lm-head",
        "log-probs and entropies: the bare product, OpenRLHF's way, other libraries', ours",
        "Log-probs and entropies from hidden states, every way that is installed, side by side. The bare product is "
        "the limit: one for the forward pass, four for forward and backward (the logits twice, and the products with "
        "their gradient), since no way keeps the logits. Gradients are those of the log-probs alone.",
    )
    shape = ["1024x896x151936"]
    flag("--shape", nargs="+", default=shape, metavar="TxHxV", help="tokens x hidden width x vocabulary")
    flag(
        "--dtype",
        nargs="+",
        choices=("bfloat16", "float16", "float32"),
        default=["bfloat16"],
        help="of hidden states and weights",
    )
    flag(
        "--tensor-parallel",
        nargs="+",
        type=int,
        default=[1],
        metavar="N",
        help="processes that share the vocabulary, one GPU each",
    )
    flag("--repeat", type=int, default=7, help="timed calls of each way")
    flag("--seed", type=int, default=1, help="of what is random")
    _output(flag)
    flag("--png", "--plot", type=Path, metavar="FILE", help="draw the times over the product's")


def _weight_sync(commands: Any) -> None:
    flag = _command(
        commands,
        "weight-sync",
        "whole weight syncs into an engine, beside a device copy",
        "GB/s of whole weight syncs into an engine, beside a device copy of the same bytes. The trainer is one "
        "process with the full tensors, so that gathering costs nothing: what is measured is packing, transfer and "
        "loading. OpenRLHF's own transfer, one call a parameter, is CUDA only; bucket size 0 has its number of calls.",
    )
    flag("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint with safetensors")
    flag(
        "--shape",
        metavar="LxHxIxV",
        help="instead of --model with --receiver process: a Llama's layers, hidden and intermediate width, vocabulary",
    )
    flag(
        "--receiver",
        choices=("vllm", "process"),
        default="vllm",
        help="an engine of vLLM's, or a process with a plain model, which needs neither vLLM nor Ray for the "
        "colocated transport",
    )
    flag(
        "--transport",
        nargs="+",
        choices=("broadcast", "colocated"),
        default=["broadcast", "colocated"],
        help="of the weights",
    )
    flag(
        "--bucket-mb",
        nargs="+",
        type=int,
        default=[0, 16, 64, 256],
        metavar="MIB",
        help="bucket sizes; 0 is one parameter a bucket; the last one is measured with checksums too",
    )
    flag("--workers", type=int, default=1, help="tensor-parallel size of the engine")
    flag("--repeat", type=int, default=7, help="counted syncs of each way")
    _output(flag)


def _layers(commands: Any) -> None:
    flag = _command(
        commands,
        "layers",
        "a stack of decoder layers on Megatron, BF16 against each FP8 recipe",
        "Decoder layers of a given shape with random weights, bfloat16 against each FP8 recipe, on one device. FLOP/s "
        "count products alone (a backward pass has twice a forward's); MFU is over the rate of a big square bfloat16 "
        "product in the same run. On a CUDA host FP8 is Transformer Engine's; elsewhere it is emulated, which tells "
        "nothing of its speed.",
    )
    flag(
        "--shape",
        nargs="+",
        default=["7b", "32b"],
        metavar="NAME",
        help="tiny, 3b, 7b or 32b (Qwen2.5's widths), or a Hugging Face config.json",
    )
    flag("--layers", type=int, metavar="N", help="(default: 4; 2 of tiny and 32b)")
    flag("--tokens", type=int, default=8192, help="of a micro-batch")
    flag("--sequence-length", type=int, default=2048, help="tokens of a row")
    flag("--micro-batches", type=int, default=4, help="of a step")
    flag("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="of FP8")
    flag("--recompute", choices=_RECOMPUTE, default="none", help="activations to compute again")
    flag("--repeat", type=int, default=7, help="timed repetitions")
    flag("--matrix", type=int, default=8192, metavar="N", help="side of the square product")
    flag("--seed", type=int, default=1, help="of what is random")
    _output(flag)


def _train_step(commands: Any) -> None:
    flag = _command(
        commands,
        "train-step",
        "a whole GTPO train step, BF16 against FP8 against the DeepSpeed actor",
        "Whole GTPO train steps of a model with random weights on Megatron, bfloat16 against FP8, and on the "
        "DeepSpeed actor where OpenRLHF and DeepSpeed are installed. Tokens are real ones, prompts included. Every "
        "precision gets a process of its own and the same batches, so that ratios are step by step. On a CUDA host "
        "FP8 is Transformer Engine's; elsewhere it is emulated, which tells nothing of its speed.",
    )
    flag(
        "--shape", default="3b", metavar="NAME", help="tiny, 3b, 7b or 32b (Qwen2.5's), or a Hugging Face config.json"
    )
    flag("--layers", type=int, metavar="N", help="instead of the shape's own")
    flag("--prompts", type=int, default=8, help="of a step")
    flag("--samples", type=int, default=8, help="responses to each")
    flag("--prompt-tokens", type=int, default=256, help="of each prompt")
    flag("--response-tokens", type=int, default=2048, help="limit of a response; the median is a sixth of it")
    flag("--max-tokens", type=int, default=8192, help="of a micro-batch")
    flag("--recompute", choices=_RECOMPUTE, default="none", help="activations to compute again")
    flag("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="of FP8")
    flag("--fp8-param", action="store_true", help="each recipe with FP8 primary weights too")
    flag("--deepspeed", action=argparse.BooleanOptionalAction, default=True, help="measure it where it is installed")
    flag("--micro-batch-size", type=int, default=4, help="rows, for DeepSpeed")
    flag("--repeat", type=int, default=3, help="counted steps")
    flag("--seed", type=int, default=1, help="of what is random")
    _output(flag)


def _train(commands: Any) -> None:
    flag = _command(
        commands,
        "train",
        "the phases of real training steps, of one configuration or several in turns",
        "The phases of real training steps, of one configuration or several in turns. Each run is the trainer itself, "
        "in its own process, with the flags behind -- and those of its configuration; it ends after its last step. "
        "Every configuration is checked before the first run. Tokens are real ones, never padding. GPUs are all a "
        "run holds; on a CPU host a process that stands for a GPU counts as one. MFU is over the measured rate of a "
        "big square product in the run's dtype, for FP8 too. With RAY_ADDRESS the runs use that cluster.",
    )
    flag("--steps", type=int, default=3, help="counted steps of a run")
    flag("--warmup", type=int, default=1, help="steps before them")
    flag("--repeat", type=int, default=1, help="runs of each configuration")
    flag(
        "--compare",
        action="append",
        default=[],
        metavar='NAME="FLAGS"',
        help="a configuration: flags of the trainer on top of the common ones, which win over them. Give it twice or "
        "more; ratios are over the first (default: one configuration)",
    )
    flag(
        "--matrix",
        type=int,
        metavar="N",
        help="side of the product that MFU is over (default: 8192; without CUDA 2048)",
    )
    _output(flag)
    flag("--png", type=Path, metavar="FILE", help="draw the phases, and the ratios")
    flag(
        "--runs",
        type=Path,
        metavar="DIR",
        help="new folder for logs and metrics that every node of a cluster sees (default: runs/benchmark_train-TIME)",
    )
    flag("trainer_flags", nargs="*", metavar="-- FLAG", help="flags of the trainer, for all")


if __name__ == "__main__":
    sys.exit(main())
