"""The flags of all benchmarks, for ``python3 -m openrlhf_gtpo.cli.benchmark NAME``.

A benchmark consists of its flags below and ``run(args)`` in the file of its name in this folder.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.cli.score import add_input_flags
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import MODES, RECIPES
from openrlhf_gtpo.megatron.parallel.layout import RECOMPUTE
from openrlhf_gtpo.platform.files import check_output

# Minimum values of number flags; 1 for all others. An advantage compares at least two responses to a prompt.
_LEAST = {
    "warmup": 0,
    "bucket_mb": 0,
    "rows": 2,
    "samples": 2,
    "sequence_length": 2,
    "seed": -(2**31),
    "layers_in_bf16": 0,
}
_MOST = 2**31 - 1
# Flags that several commands share, each with its own default.
_COUNTS = {
    "prompts": "prompts of a step",
    "samples": "responses to each prompt",
    "prompt_tokens": "tokens of each prompt",
    "response_tokens": "maximum tokens of a response",
    "repeat": "timed repetitions",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark. Return 0, 2 after one sentence about a user error, or 1 if a process failed."""
    args = build_parser().parse_args(argv)
    return exit_status(f"benchmark {args.command}", lambda: _start(args))


def _start(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        least = _LEAST.get(name, 1)
        for number in value if isinstance(value, list) else [value]:
            if type(number) is int and not least <= number <= _MOST:
                limit = f">= {least}" if number < least else f"<= {_MOST}"
                raise UsageError(f"Expected --{name.replace('_', '-')} {limit}, got {number}.")
    if args.output is not None and args.output == getattr(args, "png", None):
        raise UsageError(f"--output and --png are both {args.output}; name two files.")
    for name in ("output", "png"):  # so that no measurement is lost at the end
        check_output(f"--{name}", getattr(args, name, None))
    run(args)


def run(args: argparse.Namespace) -> None:
    """Run the benchmark named in ``args``. Imports torch and the code to measure only here."""
    if args.command in ("overhead", "actor"):  # their files import OpenRLHF
        from openrlhf_gtpo import platform
        from openrlhf_gtpo.training.checks.model import Model
        from openrlhf_gtpo.training.settings.guard import check_openrlhf

        check_openrlhf()
        model = Model(args.model, "--model")
        model.check_code("--actor.trust_remote_code to training")
        model.check_weights()
        platform.choose()
    import_module(f"benchmarks.suite.{args.command.replace('-', '_')}").run(args)


def build_parser() -> argparse.ArgumentParser:
    about = "Measurements whose numbers the documentation quotes."
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.benchmark", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    count: dict[str, Any] = {"type": int}
    path: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    preset = "tiny, 3b, 7b or 32b (Qwen2.5's widths), or a Hugging Face config.json"
    fp8 = "On a CUDA host, FP8 is Transformer Engine's; elsewhere it is emulated, which says nothing about its speed."

    def command(name: str, summary: str, description: str = "", **defaults: int) -> Callable[..., Any]:
        """Add a command with flags of :data:`_COUNTS` in ``defaults``; return the function that adds another flag."""
        flag = commands.add_parser(name, help=summary, description=description or summary).add_argument
        flag("--output", help="write everything measured to this JSON file", **path)
        if name not in ("overhead", "weight-sync", "train"):
            flag("--seed", default=1, help="random seed", **count)
        if name in ("layers", "train-step"):
            flag("--recipes", nargs="*", choices=RECIPES, default=RECIPES, help="FP8 recipes to measure")
            flag("--recompute", choices=RECOMPUTE, default="none", help="activations to recompute")
        for key, default in defaults.items():
            flag(f"--{key.replace('_', '-')}", default=default, help=_COUNTS[key], **count)
        return flag

    summary = "a GTPO step against upstream's group_norm step, same batches"
    flag = command("overhead", summary, prompts=8, samples=8, prompt_tokens=48, response_tokens=32, repeat=7)
    flag("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--micro-batch-size", default=16, help="rows of a micro-batch", **count)

    summary = "the DeepSpeed actor against the Megatron actor, same ragged batches"
    flag = command("actor", summary, prompt_tokens=64, response_tokens=512, repeat=5)
    flag("--model", required=True, metavar="DIR", help="Hugging Face checkpoint")
    flag("--rows", default=32, help="responses of a step", **count)
    flag("--micro-batch-size", default=8, help="rows of a micro-batch, for DeepSpeed", **count)
    flag("--max-tokens", default=2048, help="maximum tokens of a micro-batch, for Megatron", **count)
    flag("trainer_flags", nargs="*", metavar="-- FLAG", help="further flags of the trainer, for both")

    with_input = commands.add_parser(
        "fp8",
        help="what FP8 does to the credit of given responses, without training",
        description="Scores the same responses without FP8 and with each recipe on the Megatron actor, shapes their "
        "rewards from both, and compares. The input has a JSON object on each line: prompt and response, or tokens "
        "and group, and a number as reward; lines with the same prompt or group form a group.",
    )
    add_input_flags(with_input)
    flag = with_input.add_argument
    flag("--output", help="write the numbers, with quantiles of the errors, to this JSON file", **path)
    flag("--estimator", choices=ESTIMATORS, default="gtpo", help="estimator of the entropy credit")
    flag("--mode", choices=MODES, default="emulated", help="FP8 mode of the products")
    flag("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES), help="recipes to compare")
    layers = "compare tensorwise and blockwise also with the first N and the last N layers left in BF16"
    flag("--layers-in-bf16", default=0, metavar="N", help=layers, **count)
    flag("--tensor-parallel", default=1, metavar="N", help="processes that share each matrix", **count)
    flag("--pipeline-parallel", default=1, metavar="N", help="stages of layers", **count)

    flag = commands.add_parser(
        "mismatch",
        help="how far a rollout's log-probs and entropies are from a model's",
        description="Scores a dumped rollout with Transformers in BF16, at the rollout's temperature, and compares "
        "log-probs, entropies and the dump's own credit with what is in the dump: values of vLLM's sampler with "
        "--rollout.entropy sampler (unless its audit's gate was closed), the actor's without. The model must have "
        "the weights that sampled the rollout: for step 1, those that training began with.",
    ).add_argument
    flag("dump", type=Path, metavar="DUMP", help="a step_*.parquet of --logger.dump_rollouts")
    flag("--model", required=True, metavar="DIR", help="Hugging Face checkpoint: the policy of that step")
    flag("--max-tokens", default=8192, metavar="N", help="maximum tokens of a micro-batch", **count)
    flag("--output", help="write the numbers, with quantiles of the errors, to this JSON file", **path)

    flag = command(
        "lm-head",
        "log-probs and entropies: the bare product, OpenRLHF, other libraries, this package",
        "Log-probs and entropies from hidden states, by every implementation installed, in turn. The bare product "
        "is the limit: one for the forward pass, four for forward and backward (the logits twice, and the products "
        "with their gradient), since no implementation keeps the logits. Only log-probs have gradients.",
        repeat=7,
    )
    sizes = {"nargs": "+", "default": ["1024x896x151936"], "metavar": "TxHxV"}
    flag("--shape", help="tokens x hidden width x vocabulary", **sizes)
    dtypes = ("bfloat16", "float16", "float32")
    flag("--dtype", nargs="+", choices=dtypes, default=["bfloat16"], help="dtypes of hidden states and weights")
    ranks = "processes that share the vocabulary, one GPU each"
    flag("--tensor-parallel", nargs="+", default=[1], metavar="N", help=ranks, **count)
    flag("--png", "--plot", help="plot the times relative to the product's", **path)

    flag = command(
        "weight-sync",
        "whole weight syncs into an engine, against a device copy",
        "GB/s of whole weight syncs into an engine, against a device copy of the same bytes. The trainer is one "
        "process with the full tensors, so that gathering costs nothing: only packing, transfer and loading are "
        "measured. OpenRLHF's own transfer, one call per parameter, is CUDA only; bucket size 0 has as many calls.",
        repeat=7,
    )
    flag("--model", type=Path, metavar="DIR", help="Hugging Face checkpoint with safetensors")
    llama = "a Llama's layers, hidden width, intermediate width and vocabulary"
    flag("--shape", metavar="LxHxIxV", help=f"instead of --model with --receiver process: {llama}")
    process = "a process with a plain model, which needs neither vLLM nor Ray for the colocated transport"
    flag("--receiver", choices=("vllm", "process"), default="vllm", help=f"a vLLM engine, or {process}")
    transports = ["broadcast", "colocated"]
    flag("--transport", nargs="+", choices=transports, default=transports, help="transports of the weights")
    buckets = "bucket sizes; 0 is one parameter per bucket; the last size is measured with checksums too"
    flag("--bucket-mb", nargs="+", default=[0, 16, 64, 256], metavar="MIB", help=buckets, **count)
    flag("--workers", default=1, help="tensor-parallel size of the engine", **count)
    flag("--lora-rank", help="merge adapters of this rank too, with the last size (default: none)", **count)

    flag = command(
        "layers",
        "a stack of decoder layers on Megatron, BF16 against each FP8 recipe",
        "Decoder layers of a given shape with random weights, bfloat16 against each FP8 recipe, on one device. FLOP/s "
        "count only products (a backward pass has twice as many as a forward pass); MFU is relative to the rate of a "
        f"big square bfloat16 product in the same run. {fp8}",
        repeat=7,
    )
    flag("--shape", nargs="+", default=["7b", "32b"], metavar="NAME", help=preset)
    flag("--layers", metavar="N", help="layers of each shape (default: 4; 2 for tiny and 32b)", **count)
    flag("--tokens", default=8192, help="tokens of a micro-batch", **count)
    flag("--sequence-length", default=2048, help="tokens of a row", **count)
    flag("--micro-batches", default=4, help="micro-batches of a step", **count)
    flag("--matrix", default=8192, metavar="N", help="side of the square product", **count)

    flag = command(
        "train-step",
        "a whole GTPO train step, BF16 against FP8 against the DeepSpeed actor",
        "Whole GTPO train steps of a model with random weights on Megatron, bfloat16 against FP8, and on the "
        "DeepSpeed actor if OpenRLHF and DeepSpeed are installed. Only real tokens count, prompts included. Every "
        f"precision gets its own process and the same batches, so that ratios are taken step by step. {fp8}",
        prompts=8,
        samples=8,
        prompt_tokens=256,
        repeat=5,
    )
    flag("--shape", default="3b", metavar="NAME", help=preset)
    flag("--layers", metavar="N", help="number of layers, instead of the shape's own", **count)
    flag("--response-tokens", default=2048, help="maximum tokens of a response; the median is a sixth of it", **count)
    flag("--max-tokens", default=8192, help="maximum tokens of a micro-batch", **count)
    flag("--fp8-param", action="store_true", help="measure each recipe with FP8 primary weights too")
    flag("--deepspeed", action=argparse.BooleanOptionalAction, default=True, help="measure it if it is installed")
    # With an FP8 recipe on an H200, first visits to four batches took 4.4, 3.0, 2.0 and 1.4 s, later visits 1.4.
    flag("--warmup", default=3, help="steps before the timed ones", **count)

    flag = command(
        "train",
        "the phases of real training steps, of one configuration or several in turns",
        "The phases of real training steps, of one configuration or several in turns. Each run is the trainer itself, "
        "in its own process, with the flags after -- and its configuration's; it ends after its last step. "
        "Every configuration is checked before the first run. Tokens are real ones, never padding. GPUs are all that "
        "a run holds; on a CPU host, a process that stands in for a GPU counts as one. MFU is relative to the "
        "measured rate of a big square product in the run's dtype, for FP8 too. With RAY_ADDRESS the runs use that "
        "cluster.",
    )
    flag("--steps", default=3, help="timed steps of a run", **count)
    flag("--warmup", default=1, help="steps of a run before the timed ones", **count)
    flag("--repeat", default=1, help="runs of each configuration", **count)
    configuration = (
        "a configuration: flags of the trainer on top of the common ones, which they override. Give it twice or more; "
        "ratios are to the first (default: one configuration)"
    )
    flag("--compare", action="append", default=[], metavar='NAME="FLAGS"', help=configuration)
    side = "side of the product that MFU is relative to (default: 8192; without CUDA 512)"
    flag("--matrix", metavar="N", help=side, **count)
    flag("--png", help="plot the phases and the ratios", **path)
    runs = "new folder for logs and metrics that every node of a cluster sees (default: runs/benchmark_train-TIME)"
    flag("--runs", type=Path, metavar="DIR", help=runs)
    flag("trainer_flags", nargs="*", metavar="-- FLAG", help="flags of the trainer, for all configurations")
    return parser
