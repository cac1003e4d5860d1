"""Measures whole GTPO train steps of a model with random weights, on Megatron in bfloat16 and FP8, and on the
DeepSpeed actor. A step has the old policy's log-probs and entropies, the advantages, and an optimizer step on the
token-level policy loss.
"""

import argparse
import importlib.util
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.suite.harness import Measured, measure, median_and_range, print_table, ratios
from benchmarks.suite.random_model import random_model
from benchmarks.suite.results import write_results
from benchmarks.suite.synthetic import (
    BF16,
    long_tailed_lengths,
    precisions,
    read_shape,
    write_random_checkpoint,
)
from openrlhf_gtpo import platform
from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages, policy_surrogate
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.platform.memory import PeakMemory
from openrlhf_gtpo.platform.processes import run_processes
from openrlhf_gtpo.token_values import place

_DEEPSPEED = "deepspeed"


def run(args: argparse.Namespace) -> None:
    """Measure every precision in its own process, then DeepSpeed, and print and write the results."""
    shape = read_shape(args.shape, args.layers)
    chosen, absent = precisions(args.recipes, shape, cuda=platform.detect() == "cuda", primary_weights=args.fp8_param)
    measured: dict[str, Any] = {}

    def write() -> dict[str, Any]:
        """Write the measurements so far, in case time runs out on the next side; return the ratios."""
        compared = derived(measured)
        waiting = {name: "not finished" for name in [*chosen, _DEEPSPEED] if name not in measured}
        results = {"config": shape.to_dict(), "measured": measured, "derived": compared, "absent": waiting | absent}
        write_results(args.output, args, results)
        return compared

    for name, fp8 in chosen.items():
        try:
            measured[name] = run_processes(measure_precision, 1, args, shape, fp8).as_json()
            write()
        except (LayoutError, UsageError) as error:
            if name == BF16:  # the base of all comparisons
                raise
            absent[name] = str(error)
    missing = [name for name in ("openrlhf", "deepspeed", "ray") if importlib.util.find_spec(name) is None]
    if missing:
        absent[_DEEPSPEED] = f"not installed: {', '.join(missing)}"
    elif not args.deepspeed:
        absent[_DEEPSPEED] = "--no-deepspeed"
    elif args.recompute == "selective":
        absent[_DEEPSPEED] = "it recomputes whole layers or nothing, so not --recompute selective"
    else:
        measured[_DEEPSPEED] = _deepspeed(args, shape)
    compared = write()
    rows = []
    for name, phases in compared.items():
        for phase, numbers in phases.items():
            speed = statistics.median(numbers["tokens_per_second"])
            rows.append((name, phase, f"{speed:,.0f}", median_and_range(numbers["times_bf16"])))
    title = f"{args.shape}: medians of {args.repeat} steps of {args.prompts} x {args.samples} responses, real tokens"
    notes = (f"{name} is absent: {reason}" for name, reason in absent.items())
    print_table(title, ("precision", "phase", "tokens/s", "x bf16"), rows, notes)


def measure_precision(args: argparse.Namespace, config: Any, fp8: Fp8Options | None) -> Measured:
    """Measure steps after warm-up steps, in the one rank of the default group. The same seed gives every precision the
    same weights and batches.

    Recorded with the seconds: ``tokens`` (of each step, without padding, with prompts), ``grad_norms``, and
    ``peak_bytes`` of parameters, gradients, optimizer states and activations, None if it cannot be measured.

    Raises:
        LayoutError: this process's device does not support the requested FP8.
        UsageError: the model does not fit into the device's memory.
    """
    groups.initialize(Layout(), args.seed)
    memory = PeakMemory()
    try:
        model = random_model(config.to_dict(), ModelOptions(fp8=fp8, recompute=args.recompute), args.seed)
        step = Step(Trainer(model, OptimizerOptions()), args, config.vocab_size)
        phases = {"old_policy": step.old_policy, "advantages": step.advantages, "train": step.train}
        measured = measure({"": phases}, args.repeat, args.warmup, new_round=step.new_batch)[""]
    except torch.OutOfMemoryError as error:
        raise UsageError("out of memory; give fewer --layers or --max-tokens, or --recompute full.") from error
    tokens, norms = step.tokens[args.warmup :], step.grad_norms[args.warmup :]
    measured.about = {"tokens": tokens, "grad_norms": norms, "peak_bytes": memory.beyond()}
    return measured


class Step:
    """One step on Megatron. Its phases run in the order ``old_policy``, ``advantages``, ``train``.

    Fields:
        micro_batches: each of at most ``args.max_tokens`` tokens, or one longer row.
        outcome: (B,) 1 or 0, half each in every group, in the order of the micro-batches.
        group_ids: (B,).
        tokens, grad_norms: of each step; tokens without padding, with prompts.
    """

    def __init__(self, trainer: Trainer, args: argparse.Namespace, vocabulary: int) -> None:
        self._trainer, self._args, self._vocabulary = trainer, args, vocabulary
        self.tokens: list[int] = []
        self.grad_norms: list[float] = []

    def new_batch(self, repetition: int) -> None:
        """Make ``prompts`` groups of ``samples`` responses, whose median length is a sixth of ``response_tokens``."""
        args, seed = self._args, self._args.seed + repetition
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for length in long_tailed_lengths(args.prompts * args.samples, args.response_tokens, seed).tolist():
            tokens = torch.randint(self._vocabulary, (args.prompt_tokens + length,), generator=generator)
            rows.append((tokens, torch.arange(len(tokens)) >= args.prompt_tokens))
        members = first_fit([len(tokens) for tokens, _ in rows], args.max_tokens)
        order = torch.tensor([row for part in members for row in part])
        self.micro_batches = [[rows[i] for i in part] for part in members]
        self.outcome, self.group_ids = (order % 2).float(), order // args.samples
        self.tokens.append(sum(len(tokens) for tokens, _ in rows))
        actions = [marks[1:] for micro_batch in self.micro_batches for _, marks in micro_batch]
        self._mask = pad_sequence(actions, batch_first=True)  # (B, A)

    def old_policy(self) -> None:
        self._old = schedule.forward(self._trainer.model, self.micro_batches)

    def advantages(self) -> None:
        entropy = place(torch.cat([values.entropy for values in self._old]), self._mask)
        advantages = gtpo_advantages(entropy, self._mask, self.outcome, self.group_ids, GTPOConfig())
        self._advantages = advantages[self._mask].split([len(values.log_probs) for values in self._old])

    def train(self) -> None:
        actions = int(self._mask.sum())

        def loss(index: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, None]:
            old, advantages = self._old[index].log_probs, self._advantages[index]
            terms = (log_probs, old, advantages, torch.ones_like(old, dtype=torch.bool))
            surrogate = policy_surrogate(*(term.to(log_probs.device)[None] for term in terms), level="token")
            return surrogate.loss.sum() / actions, None

        self.grad_norms.append(self._trainer.step(self.micro_batches, loss).grad_norm)


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches with indices into ``lengths``: longest first, each into the first with room or alone.

    The trainer's ``fill_micro_batches`` balances with OpenRLHF's code, which this benchmark must not need.
    """
    parts: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fits = (part for part in parts if sum(lengths[i] for i in part) + lengths[row] <= max_tokens)
        part = next(fits, None)
        if part is None:
            parts.append([row])
        else:
            part.append(row)
    return parts


def _deepspeed(args: argparse.Namespace, shape: Any) -> dict[str, Any]:
    """Measure DeepSpeed like a precision, but without the advantages, which are computed outside this actor."""
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    platform.choose()

    import ray

    from benchmarks.suite.actor import measure_actors
    from openrlhf_gtpo.training.actors.policy_actor import EntropyPolicyActor

    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(shape, Path(folder), args.seed)
        actor_args = argparse.Namespace(**(vars(args) | {"model": folder, "micro_batch_size": 1}))
        # Packed micro-batches of ``max_tokens``, as on Megatron; by default OpenRLHF pads a fixed number of rows.
        flags = ["--train.dynamic_batch_enable"]
        flags += ["--actor.gradient_checkpointing_enable"] if args.recompute == "full" else []
        side = measure_actors(actor_args, {_DEEPSPEED: ray.remote(EntropyPolicyActor)}, flags)[_DEEPSPEED]
    return {
        "seconds": {"old_policy": side.seconds["forward"], "train": side.seconds["train"]},
        "tokens": side.about["tokens"],
        "peak_bytes": side.about["peak_bytes"],
    }


def derived(measured: dict[str, Any]) -> dict[str, Any]:
    """Compute for each precision, each phase and the whole ``step``: tokens/s of each step, and its speed relative to
    bfloat16 on Megatron in the same phases (on DeepSpeed, without the advantages)."""

    def speeds(side: dict[str, Any], phases: Iterable[str]) -> dict[str, list[float]]:
        seconds = {phase: side["seconds"][phase] for phase in phases}
        seconds["step"] = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
        return {phase: ratios(side["tokens"], each) for phase, each in seconds.items()}

    by_precision: dict[str, Any] = {}
    for name, side in measured.items():
        base = speeds(measured[BF16], side["seconds"])
        by_precision[name] = {
            phase: {"tokens_per_second": speed, "times_bf16": ratios(speed, base[phase])}
            for phase, speed in speeds(side, side["seconds"]).items()
        }
    return by_precision
