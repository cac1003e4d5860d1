"""Compares implementations of log-probs and entropies from hidden states (``lm_head_ways``) on the same inputs."""

import argparse
import re
import statistics
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.suite.harness import Measured, measure, print_table
from benchmarks.suite.lm_head_ways import OURS, OURS_WITHOUT_ENTROPY, PRODUCT, Outputs, Phase, Problem, ways
from benchmarks.suite.results import write_results
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.memory import PeakMemory
from openrlhf_gtpo.platform.processes import run_processes

TEMPERATURE = 0.8
COMPARED_TOKENS = 64  # tokens compared with float64
LOGIT_SCALE = 3.0  # standard deviation of the logits: entropies like those of a language model
PHASES = ("forward", "forward_backward")


def run(args: argparse.Namespace) -> None:
    """Measure every shape with every dtype and tensor-parallel size, and print, write and draw the results."""
    shapes = []
    for text in args.shape:
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
            raise UsageError(f"Expected --shape TOKENSxHIDDENxVOCABULARY, such as 1024x896x151936, got {text}.")
        shapes.append(dict(zip(("tokens", "width", "vocabulary"), map(int, text.split("x")), strict=True)))
    for ranks in args.tensor_parallel:
        if any(shape["vocabulary"] % ranks for shape in shapes):
            raise UsageError(f"--tensor-parallel {ranks} does not divide every vocabulary of --shape.")
    cases = []
    for ranks, dtype, sizes in product(args.tensor_parallel, args.dtype, shapes):
        shape = {**sizes, "dtype": dtype}
        measured, absent = run_processes(measure_ways, ranks, shape, args.repeat, args.seed)
        base, on, off = (measured[name] for name in (PRODUCT, OURS, OURS_WITHOUT_ENTROPY))
        case = {
            "shape": shape,
            "tensor_parallel": ranks,
            "measured": {name: side.as_json() for name, side in measured.items()},
            "over_product": {n: {phase: side.over(base, phase) for phase in PHASES} for n, side in measured.items()},
            "entropy_on_over_off": {phase: on.over(off, phase) for phase in PHASES},
            "absent": absent,
        }
        cases.append(case)
        _print(case, args.repeat)
        write_results(args.output, args, {"cases": cases})  # the next one may run out of memory
    if args.png:
        from benchmarks.suite.plots import plot_lm_head

        print(f"wrote {plot_lm_head(cases, args.png)}")


def measure_ways(shape: dict[str, Any], repeat: int, seed: int) -> tuple[dict[str, Measured], dict[str, str]]:
    """Measure every implementation, in every rank of the default group, which shards the vocabulary; return the
    measurements by name, and why others are absent.

    The first round measures memory and errors and is not timed. Recorded with each one's seconds: ``extra_bytes``: by
    phase, the peak beyond inputs, outputs and gradients, None if it cannot be measured; ``log_prob_error``,
    ``entropy_error``: maximum difference from float64, in nats, None if there is nothing to compare; ``failure``: by
    phase, why there is no number.

    Args:
        shape: ``tokens`` T, hidden ``width`` H, ``vocabulary`` columns V over all ranks, and the inputs' ``dtype``.

    Raises:
        UsageError: one of several ranks is out of memory, and the others would wait for it.
    """
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    problem, full_weight = _problem(shape, seed, ranks, rank)
    exact = _exact(problem.hidden, full_weight, problem.labels)
    del full_weight
    available, absent = ways(cuda=problem.hidden.is_cuda, sharded=ranks > 1)
    sides: dict[str, dict[str, Any]] = {name: {} for name in available}
    about: dict[str, dict[str, Any]] = {}
    for name, way in available.items():
        about[name] = {"extra_bytes": {}, "log_prob_error": None, "entropy_error": None, "failure": {}}
        for phase, call in zip(PHASES, way, strict=True):
            _probe(phase, call, problem, exact, about[name])
            if phase not in about[name]["failure"]:
                sides[name][phase] = partial(call, problem)
            elif ranks > 1:
                reason = about[name]["failure"][phase]
                raise UsageError(f"{name} on {ranks} processes: {reason}; give fewer tokens in --shape.")
    measured = measure(sides, repeat, warm_up=0, before_each=problem.drop_gradients)
    for name, side in measured.items():
        side.about = about[name]
    return measured, absent


def _problem(shape: dict[str, Any], seed: int, ranks: int, rank: int) -> tuple[Problem, Tensor]:
    """This rank's share of the problem, and the whole weight."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    tokens, width, vocabulary, dtype = shape["tokens"], shape["width"], shape["vocabulary"], shape["dtype"]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=getattr(torch, dtype))

    hidden = normal(tokens, width) * (LOGIT_SCALE / width**0.5)
    full_weight = normal(vocabulary, width)
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    weight = full_weight.chunk(ranks)[rank].clone() if ranks > 1 else full_weight
    group = torch.distributed.group.WORLD if ranks > 1 else None
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), labels, TEMPERATURE, group), full_weight


@torch.no_grad()
def _exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    """Log-probs and entropies of the first tokens in float64, from logits that are also in float64."""
    first_tokens = hidden[:COMPARED_TOKENS].double()
    logits = torch.cat([first_tokens @ part.double().t() for part in weight.split(8192)], dim=1) / TEMPERATURE
    log_p = logits.log_softmax(1)
    return log_p.gather(1, labels[: len(first_tokens), None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def _probe(phase: str, call: Phase, problem: Problem, exact: Outputs, about: dict[str, Any]) -> None:
    """Record memory and errors of one call, which also warms up."""
    problem.drop_gradients()
    call(problem.first_tokens(8))  # one-time allocations: compiled kernels, workspaces
    problem.drop_gradients()
    memory = PeakMemory()
    try:
        outputs = call(problem)
    except torch.OutOfMemoryError as error:
        about["failure"][phase] = f"out of memory: {str(error).splitlines()[0]}"
        return
    peak = memory.beyond()
    results = [tensor for tensor in (*(outputs or ()), problem.hidden.grad, problem.weight.grad) if tensor is not None]
    about["extra_bytes"][phase] = None if peak is None else peak - sum(tensor.nbytes for tensor in results)
    if outputs is not None and phase == "forward":
        for name, values, truth in zip(("log_prob_error", "entropy_error"), outputs, exact, strict=True):
            if values is not None and truth is not None:
                about[name] = float((values[: len(truth)].double() - truth).abs().max())


def _print(case: dict[str, Any], repeat: int) -> None:
    rows = []
    for name, side in case["measured"].items():
        cells = [name]
        for phase in PHASES:
            if phase in side["failure"]:
                cells += ["no memory", "", ""]
                continue
            extra, over = side["extra_bytes"][phase], case["over_product"][name][phase]
            cells.append(f"{statistics.median(side['seconds'][phase]) * 1e3:.1f}")
            cells.append(f"{statistics.median(over):.2f}" if over else "?")
            cells.append("?" if extra is None else f"{extra / 2**20:.0f}")
        errors = side["log_prob_error"], side["entropy_error"]
        rows.append([*cells, *("" if error is None else f"{error:.1e}" for error in errors)])
    costs = {phase: ratios for phase, ratios in case["entropy_on_over_off"].items() if ratios}
    texts = (f"{phase.replace('_', ' + ')} {statistics.median(ratios):.3f}" for phase, ratios in costs.items())
    notes = [f"ours with entropy over ours without: {', '.join(texts)}"]
    notes += [f"{name} is absent: {reason}" for name, reason in case["absent"].items()]
    shape = case["shape"]
    print_table(
        f"T {shape['tokens']}, H {shape['width']}, V {shape['vocabulary']}, {shape['dtype']}, TP "
        f"{case['tensor_parallel']}; medians of {repeat} calls, product = 1; extra memory in MiB; errors in nats",
        ("way", "forward ms", "x", "MiB", "fwd+bwd ms", "x", "MiB", "log-prob", "entropy"),
        rows,
        notes,
    )
