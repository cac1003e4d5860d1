"""Compares decoder layers of one shape in bfloat16 and in FP8 on the same batches.

It times the Megatron actor's own code on a model with few layers and a tiny vocabulary, so that embedding and head
hardly count: ``schedule.forward``, ``schedule.forward_backward`` into float32 gradients, and ``Trainer.step``.
"""

import argparse
import statistics
from typing import Any

import torch

from benchmarks.suite.harness import SquareProduct, measure, median_and_range, print_table, ratios
from benchmarks.suite.random_model import random_model
from benchmarks.suite.results import write_results
from benchmarks.suite.synthetic import BF16, precisions, read_shape
from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.host import has_transformer_engine
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.model_shape import ModelShape, decoder_flops
from openrlhf_gtpo.platform.memory import PeakMemory
from openrlhf_gtpo.platform.processes import run_processes
from openrlhf_gtpo.token_values import MicroBatch

PHASES = {"forward": 1, "forward_backward": 3, "train_step": 3}  # and their products, in forward passes
VOCABULARY = 1024
# By preset. Weights, gradients and optimizer states of four precisions (18 bytes a parameter) take at most 70 GB.
_LAYERS = {"tiny": 2, "32b": 2}
_PRODUCT = "product"


def run(args: argparse.Namespace) -> None:
    """Measure every shape, with all precisions in one process, and print and write the results."""
    if args.tokens % args.sequence_length:
        raise UsageError(f"--tokens {args.tokens} is not a multiple of --sequence-length {args.sequence_length}.")
    shapes = {name: read_shape(name, args.layers or _LAYERS.get(name, 4)) for name in args.shape}
    cases = []
    for name, shape in shapes.items():
        chosen, absent = precisions(args.recipes, shape, cuda=platform.detect() == "cuda")
        case = run_processes(case_of, 1, args, shape, chosen)
        case |= {"shape": name, "config": shape.to_dict(), "absent": absent, "derived": derived(case)}
        cases.append(case)
        _print(case, args.repeat)
        write_results(args.output, args, {"cases": cases})  # the next shape may run out of memory


def case_of(args: argparse.Namespace, config: Any, chosen: dict[str, Fp8Options | None]) -> dict[str, Any]:
    """Measure every precision, and the device's rate of multiplication, in the one rank of the default group.

    The first round measures memory and is not timed.

    Raises:
        UsageError: the device's memory is too small for all precisions together.
    """
    groups.initialize(Layout(), args.seed)
    config.vocab_size, config.tie_word_embeddings = VOCABULARY, False
    batches = _batches(args)
    sides: dict[str, Any] = {}
    about: dict[str, dict[str, Any]] = {}
    for name, fp8 in chosen.items():
        about[name] = {"fp8": f"{fp8.mode} {fp8.recipe}" if fp8 else None, "peak_bytes": None, "failure": None}
        try:
            memory = PeakMemory()
            model = random_model(config.to_dict(), ModelOptions(fp8=fp8, recompute=args.recompute), args.seed)
            side = _phases(Trainer(model, OptimizerOptions()), batches)
            for phase in side.values():
                phase()
            sides[name], about[name]["peak_bytes"] = side, memory.beyond()
        except LayoutError as error:  # this device does not support the recipe
            sides[name], about[name]["failure"] = {}, str(error)
        except torch.OutOfMemoryError as error:
            others = ", ".join(sides) or "nothing"
            raise UsageError(
                f"{name} does not fit beside {others}; give fewer --layers, --recipes or --tokens."
            ) from error
    product = SquareProduct(args.matrix)
    measured = measure({**sides, _PRODUCT: {_PRODUCT: product}}, args.repeat, warm_up=0)
    rates = [product.flops / seconds for seconds in measured.pop(_PRODUCT).seconds[_PRODUCT]]
    for name, result in measured.items():
        result.about = about[name]
    rows = args.tokens // args.sequence_length
    forward = args.micro_batches * decoder_flops(ModelShape.of(config), [args.sequence_length] * rows)
    return {
        "layers": "transformer_engine" if has_transformer_engine() else "portable",
        "tokens": args.tokens * args.micro_batches,
        "flops": {phase: passes * forward for phase, passes in PHASES.items()},
        "matrix": {"side": args.matrix, "dtype": "bfloat16", "flops_per_second": rates},
        "measured": {name: result.as_json() for name, result in measured.items()},
    }


def derived(case: dict[str, Any]) -> dict[str, Any]:
    """Compute for each precision and phase: tokens/s and FLOP/s of each repetition, median FLOP/s over the median rate
    of the product (MFU), and each repetition's speed relative to bfloat16."""
    rate = statistics.median(case["matrix"]["flops_per_second"])
    by_precision: dict[str, Any] = {}
    for name, side in case["measured"].items():
        by_precision[name] = {}
        for phase, seconds in side["seconds"].items():
            flops = [case["flops"][phase] / duration for duration in seconds]
            by_precision[name][phase] = {
                "tokens_per_second": [case["tokens"] / duration for duration in seconds],
                "flops_per_second": flops,
                "mfu": statistics.median(flops) / rate,
                "times_bf16": ratios(case["measured"][BF16]["seconds"][phase], seconds),
            }
    return by_precision


def _phases(trainer: Trainer, batches: list[MicroBatch]) -> dict[str, Any]:
    """The timed phases of one precision's model and optimizer."""
    tokens = sum(len(row) for batch in batches for row, _ in batch)

    def loss(index: int, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        return -log_probs.sum() / tokens, None

    def forward_backward() -> None:
        trainer.ddp.train()
        trainer.ddp.zero_grad_buffer()
        schedule.forward_backward(trainer.model, trainer.ddp, batches, loss, with_entropy=False)

    return {
        "forward": lambda: schedule.forward(trainer.model, batches),
        "forward_backward": forward_backward,
        "train_step": lambda: trainer.step(batches, loss),
    }


def _batches(args: argparse.Namespace) -> list[MicroBatch]:
    """Random tokens; all but the first of each row are actions."""
    generator = torch.Generator().manual_seed(args.seed)
    shape = args.tokens // args.sequence_length, args.sequence_length
    batches = []
    for _ in range(args.micro_batches):
        tokens = torch.randint(VOCABULARY, shape, generator=generator)
        batches.append([(row, torch.arange(len(row)) > 0) for row in tokens])
    return batches


def _print(case: dict[str, Any], repeat: int) -> None:
    rows = []
    for name, phases in case["derived"].items():
        side = case["measured"][name]
        label = f"{name} ({side['fp8'].split()[0]})" if side["fp8"] else name
        memory = "?" if side["peak_bytes"] is None else f"{side['peak_bytes'] / 2**30:.1f}"
        for phase, numbers in phases.items():
            tokens, flops = (statistics.median(numbers[f"{unit}_per_second"]) for unit in ("tokens", "flops"))
            times = median_and_range(numbers["times_bf16"])
            speed = f"{flops / 1e12:.2f}", f"{numbers['mfu']:.1%}"
            rows.append((label, phase, f"{tokens:,.0f}", times, *speed, memory))
    notes = [
        f"{name} was not measured: {side['failure']}" for name, side in case["measured"].items() if side["failure"]
    ]
    notes += [f"{name} is absent: {reason}" for name, reason in case["absent"].items()]
    matrix = case["matrix"]
    print_table(
        f"{case['config']['num_hidden_layers']} layers of {case['shape']} ({case['layers']}), {case['tokens']} tokens "
        f"a step; medians of {repeat}; {matrix['dtype']} product of {matrix['side']}: "
        f"{statistics.median(matrix['flops_per_second']) / 1e12:.2f} TFLOP/s",
        ("precision", "phase", "tokens/s", "x bf16", "TFLOP/s", "MFU", "GiB"),
        rows,
        notes,
    )
