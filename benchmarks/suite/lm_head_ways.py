"""Implementations of log-probs and entropies from hidden states: the bare product, upstream's, other libraries' if
they are installed, and this package's."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy

PRODUCT = "product"
OURS = "openrlhf_gtpo"
OURS_WITHOUT_ENTROPY = "openrlhf_gtpo, no entropy"
_PRODUCT_BYTES = 2**30  # bytes of logits at a time


@dataclass(frozen=True)
class Problem:
    """The input of each: hidden (T, H), this rank's weight (V / TP, H), labels (T,) over the whole vocabulary."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    group: torch.distributed.ProcessGroup | None

    def first_tokens(self, tokens: int) -> "Problem":
        hidden = self.hidden.detach()[:tokens].clone().requires_grad_()
        return replace(self, hidden=hidden, labels=self.labels[:tokens])

    def drop_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


Outputs = tuple[Tensor, Tensor | None]  # log-probs (T,) and entropies (T,)
Run = Callable[[Problem], Outputs]
Phase = Callable[[Problem], Outputs | None]  # None for the bare product, which has neither
# A forward pass, and a forward and backward pass that leaves gradients of the log-probs' sum in ``hidden.grad`` and
# ``weight.grad``.
Way = tuple[Phase, Phase]


def ways(*, cuda: bool, sharded: bool) -> tuple[dict[str, Way], dict[str, str]]:
    """Return the implementations that can run here, by name, with the bare product first, and why others cannot.

    Args:
        cuda: True if the problems are on a CUDA device.
        sharded: True if the vocabulary is sharded.
    """
    product = _Product()
    available: dict[str, Way] = {PRODUCT: (product.forward, product.forward_backward)}
    absent = {}
    libraries = {"openrlhf": ("openrlhf", _openrlhf), "liger": ("liger_kernel", _liger), "verl": ("verl", _verl)}
    for name, (module, load) in libraries.items():
        if importlib.util.find_spec(module) is None:
            absent[name] = "not installed"
            continue
        try:
            available[name] = _differentiable(load(cuda, sharded))
        except (ImportError, NotImplementedError) as error:
            absent[name] = str(error)
    available[OURS] = _differentiable(_ours(with_entropy=True))
    available[OURS_WITHOUT_ENTROPY] = _differentiable(_ours(with_entropy=False))
    return available, absent


def _differentiable(run: Run) -> Way:
    @torch.no_grad()
    def forward(problem: Problem) -> Outputs:
        return run(problem)

    def forward_backward(problem: Problem) -> Outputs:
        problem.drop_gradients()
        outputs = run(problem)
        outputs[0].sum().backward()
        return outputs

    return forward, forward_backward


def _ours(*, with_entropy: bool) -> Run:
    return lambda p: linear_log_prob_and_entropy(
        p.hidden, p.weight, p.labels, temperature=p.temperature, group=p.group, with_entropy=with_entropy
    )


def _openrlhf(cuda: bool, sharded: bool) -> Run:
    """Upstream's ``Actor.forward`` from the logits on. Its entropy needs no gradient here, which saves memory."""
    if sharded:
        raise NotImplementedError("does not support tensor parallelism")
    from openrlhf.models.utils import compute_entropy, log_probs_from_logits

    def run(problem: Problem) -> Outputs:
        logits = (problem.hidden @ problem.weight.t()).to(torch.float32)
        log_probs = log_probs_from_logits(logits, problem.labels, temperature=problem.temperature)
        with torch.no_grad():
            return log_probs, compute_entropy(logits)

    return run


def _liger(cuda: bool, sharded: bool) -> Run:
    from liger_kernel import ops

    if sharded and not cuda:
        raise NotImplementedError("its tensor parallelism needs CUDA")

    kind = "TPFunction" if sharded else "Function"
    function = getattr(ops, f"LigerFusedLinearScaledCrossEntropy{kind}")

    def run(problem: Problem) -> Outputs:
        group = (problem.group,) if sharded else ()
        tensors = problem.hidden, problem.weight, problem.labels
        nll, entropy = function.apply(*tensors, *group, problem.temperature, return_entropy=True)
        return -nll, entropy

    return run


def _verl(cuda: bool, sharded: bool) -> Run:
    if cuda:
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        return lambda p: linear_cross_entropy(p.hidden, p.weight, p.labels, p.temperature, "none", p.group)
    if sharded:
        raise NotImplementedError("its kernels need CUDA, and the rest does not support tensor parallelism")
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    module = FusedLinearForPPO()
    return lambda p: module(p.hidden, p.weight, p.labels, p.temperature)


class _Product:
    """Only the products, into preallocated memory: fresh pages would cost up to a fourth of the time."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def forward(self, problem: Problem) -> None:
        """The logits."""
        for hidden, logits in self._parts(problem):
            torch.mm(hidden, problem.weight.t(), out=logits)

    @torch.no_grad()
    def forward_backward(self, problem: Problem) -> None:
        """Compute the logits twice, and the two products with their gradient: the minimum without kept logits."""
        d_hidden = self._place("hidden", problem.hidden, problem.hidden.shape)
        d_weight = self._place("weight", problem.weight, problem.weight.shape)
        start = 0
        for hidden, logits in self._parts(problem):
            torch.mm(hidden, problem.weight.t(), out=logits)
            torch.mm(hidden, problem.weight.t(), out=logits)
            torch.mm(logits, problem.weight, out=d_hidden[start : start + len(hidden)])
            if start == 0:
                torch.mm(logits.t(), hidden, out=d_weight)
            else:
                d_weight.addmm_(logits.t(), hidden)
            start += len(hidden)

    def _parts(self, problem: Problem) -> list[tuple[Tensor, Tensor]]:
        """The hidden states in chunks of consecutive tokens, each with memory for its logits."""
        columns = problem.weight.size(0)
        parts = problem.hidden.split(max(1, _PRODUCT_BYTES // (columns * problem.weight.element_size())))
        memory = self._place("logits", problem.hidden, (len(parts[0]), columns))
        return [(part, memory[: len(part)]) for part in parts]

    def _place(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        if name not in self._memory or self._memory[name].shape != torch.Size(shape):
            self._memory[name] = like.new_empty(shape)
        return self._memory[name]
