"""Times the ways of ``lm_head_ways`` side by side in one run, in turns, on the same inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf_gtpo.benchmarks.lm_head_ways import PRODUCT, Outputs, Problem, Way, Ways
from openrlhf_gtpo.benchmarks.rates import seconds_of
from openrlhf_gtpo.platform.memory import PeakMemory

TEMPERATURE = 0.8
COMPARED_TOKENS = 64  # with float64
LOGIT_SCALE = 3.0  # standard deviation of the logits: entropies like those of a language model
PHASES = ("forward", "forward_backward")


@dataclass(frozen=True)
class Shape:
    """T tokens, hidden width H, V columns of the vocabulary over all ranks, and the inputs' dtype."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str


@dataclass
class Measured:
    """Of one way.

    Fields:
        seconds: phase to the seconds of each repetition.
        extra_bytes: phase to the peak beyond inputs, outputs and gradients; None where it cannot be told.
        log_prob_error, entropy_error: greatest difference from float64, in nats; None where there is nothing to compare.
        failure: phase to why there is no number.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    extra_bytes: dict[str, int | None] = field(default_factory=dict)
    log_prob_error: float | None = None
    entropy_error: float | None = None
    failure: dict[str, str] = field(default_factory=dict)


def measure(shape: Shape, repeat: int, seed: int) -> dict[str, Any]:
    """In every rank of the default group, which shards the vocabulary: a measurement by name, and why others are absent.

    Repetitions alternate the order of the ways. A first one, in which memory and errors are measured, is not timed.
    """
    ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    problem, whole = _problem(shape, seed, ranks, rank)
    exact = _exact(problem.hidden, whole, problem.labels)
    del whole
    cuda = problem.hidden.is_cuda
    ways = Ways(cuda=cuda, sharded=ranks > 1)
    found = ways.all()
    measured = {name: Measured() for name in found}
    for name, way in found.items():
        for phase in PHASES:
            _probe(phase, way, problem, exact, measured[name])
    names = list(found)
    for repetition in range(repeat):
        for phase in PHASES:
            for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
                if phase not in measured[name].failure:
                    seconds = _timed(getattr(found[name], phase), problem)
                    measured[name].seconds.setdefault(phase, []).append(seconds)
    return {"measured": measured, "absent": ways.absent}


def ratios(measured: dict[str, Measured], phase: str, name: str, base: str = PRODUCT) -> list[float]:
    """Seconds of ``name`` over those of ``base``, repetition by repetition."""
    pairs: Sequence[list[float]] = [measured[way].seconds.get(phase, []) for way in (name, base)]
    return [one / other for one, other in zip(*pairs, strict=True)] if all(pairs) else []


def _problem(shape: Shape, seed: int, ranks: int, rank: int) -> tuple[Problem, Tensor]:
    """This rank's share, and the whole weight."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, shape.dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device, dtype=dtype)

    hidden = normal(shape.tokens, shape.width) * (LOGIT_SCALE / shape.width**0.5)
    whole = normal(shape.vocabulary, shape.width)
    labels = torch.randint(shape.vocabulary, (shape.tokens,), generator=generator, device=device)
    columns = shape.vocabulary // ranks
    mine = whole[rank * columns : (rank + 1) * columns] if ranks > 1 else whole
    group = torch.distributed.group.WORLD if ranks > 1 else None
    weight = mine.clone() if ranks > 1 else mine
    return Problem(hidden.requires_grad_(), weight.requires_grad_(), labels, TEMPERATURE, group), whole


@torch.no_grad()
def _exact(hidden: Tensor, weight: Tensor, labels: Tensor) -> Outputs:
    """float64 log-probs and entropies of the first tokens, of logits that are exact too."""
    some = hidden[:COMPARED_TOKENS].double()
    logits = torch.cat([some @ part.double().t() for part in weight.split(8192)], dim=1) / TEMPERATURE
    log_p = logits.log_softmax(1)
    return log_p.gather(1, labels[: len(some), None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


def _probe(phase: str, way: Way, problem: Problem, exact: Outputs, into: Measured) -> None:
    """Memory and errors of one call, which also warms up."""
    problem.hidden.grad = problem.weight.grad = None
    getattr(way, phase)(_first_tokens(problem))  # what a process allocates once: compiled kernels, workspaces
    problem.hidden.grad = problem.weight.grad = None
    memory = PeakMemory()
    try:
        outputs = getattr(way, phase)(problem)
    except torch.OutOfMemoryError as error:
        into.failure[phase] = f"out of memory: {str(error).splitlines()[0]}"
        return
    peak = memory.beyond()
    gradients = [tensor.grad for tensor in (problem.hidden, problem.weight) if tensor.grad is not None]
    kept = [tensor for tensor in (*(outputs or ()), *gradients) if tensor is not None]
    into.extra_bytes[phase] = None if peak is None else peak - sum(tensor.nbytes for tensor in kept)
    if outputs is not None and phase == "forward":
        errors = [
            None if mine is None or truth is None else float((mine[: len(truth)].double() - truth).abs().max())
            for mine, truth in zip(outputs, exact, strict=True)
        ]
        into.log_prob_error, into.entropy_error = errors


def _first_tokens(problem: Problem) -> Problem:
    hidden = problem.hidden.detach()[:8].clone().requires_grad_()
    return Problem(hidden, problem.weight, problem.labels[:8], problem.temperature, problem.group)


def _timed(run: Callable[[Problem], Any], problem: Problem) -> float:
    problem.hidden.grad = problem.weight.grad = None
    torch.distributed.barrier()
    return seconds_of(lambda: run(problem))
