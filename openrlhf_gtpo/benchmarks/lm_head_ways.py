"""Ways from hidden states to log-probs and entropies, for ``cli.benchmark lm-head``: the bare product, upstream's, other
libraries' where they are installed, and this package's."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy

Outputs = tuple[Tensor, Tensor | None]  # log-probs (T,) and entropies (T,)

PRODUCT = "product"
OURS = "openrlhf_gtpo"
OURS_WITHOUT_ENTROPY = "openrlhf_gtpo, no entropy"
_PRODUCT_BYTES = 2**30  # of logits at a time


@dataclass(frozen=True)
class Problem:
    """What every way is given: hidden (T, H), this rank's weight (V / TP, H), labels (T,) of the whole vocabulary."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    temperature: float
    group: torch.distributed.ProcessGroup | None


@dataclass(frozen=True)
class Way:
    """One way.

    Fields:
        forward: log-probs and entropies; None where it gives neither (the bare product).
        forward_backward: both, and gradients of the log-probs' sum in ``hidden.grad`` and ``weight.grad``.
        has_entropy: whether it gives entropies.
    """

    forward: Callable[[Problem], Outputs | None]
    forward_backward: Callable[[Problem], Outputs | None]
    has_entropy: bool = True


@dataclass
class Ways:
    """The ways that can run here, the bare product first, and why others cannot.

    Args:
        cuda: whether the problems are on a CUDA device.
        sharded: whether the vocabulary is.
    """

    cuda: bool
    sharded: bool
    absent: dict[str, str] = field(default_factory=dict)

    def all(self) -> dict[str, Way]:
        """Name to way; fills ``absent``."""
        product = _Product()
        found = {
            PRODUCT: Way(product.one, product.four),
            "openrlhf": self._installed("openrlhf", "openrlhf", self._openrlhf),
            "liger": self._installed("liger", "liger_kernel", self._liger),
            "verl": self._installed("verl", "verl", self._verl),
            OURS: _differentiable(_ours),
            OURS_WITHOUT_ENTROPY: _differentiable(_ours_without_entropy, has_entropy=False),
        }
        return {name: way for name, way in found.items() if way is not None}

    def _installed(self, name: str, module: str, load: Callable[[], Callable[[Problem], Outputs]]) -> Way | None:
        if importlib.util.find_spec(module) is None:
            self.absent[name] = "not installed"
            return None
        try:
            return _differentiable(load())
        except (ImportError, NotImplementedError) as error:
            self.absent[name] = str(error)
            return None

    def _openrlhf(self) -> Callable[[Problem], Outputs]:
        if self.sharded:
            raise NotImplementedError("knows no tensor parallelism")
        return _openrlhf

    def _liger(self) -> Callable[[Problem], Outputs]:
        from liger_kernel import ops

        if self.sharded and not self.cuda:
            raise NotImplementedError("its tensor parallelism needs CUDA")

        def run(problem: Problem) -> Outputs:
            tensors = problem.hidden, problem.weight, problem.labels
            if self.sharded:
                nll, entropy = ops.LigerFusedLinearScaledCrossEntropyTPFunction.apply(
                    *tensors, problem.group, problem.temperature, return_entropy=True
                )
            else:
                nll, entropy = ops.LigerFusedLinearScaledCrossEntropyFunction.apply(
                    *tensors, problem.temperature, return_entropy=True
                )
            return -nll, entropy

        return run

    def _verl(self) -> Callable[[Problem], Outputs]:
        if self.cuda:
            from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

            return lambda p: linear_cross_entropy(p.hidden, p.weight, p.labels, p.temperature, "none", p.group)
        if self.sharded:
            raise NotImplementedError("its kernels need CUDA, and the rest knows no tensor parallelism")
        from verl.utils.experimental.torch_functional import FusedLinearForPPO

        module = FusedLinearForPPO()
        return lambda p: module(p.hidden, p.weight, p.labels, p.temperature)


def _differentiable(run: Callable[[Problem], Outputs], *, has_entropy: bool = True) -> Way:
    @torch.no_grad()
    def forward(problem: Problem) -> Outputs:
        return run(problem)

    def forward_backward(problem: Problem) -> Outputs:
        problem.hidden.grad = problem.weight.grad = None
        outputs = run(problem)
        outputs[0].sum().backward()
        return outputs

    return Way(forward, forward_backward, has_entropy)


def _ours(problem: Problem, *, with_entropy: bool = True) -> Outputs:
    return linear_log_prob_and_entropy(
        problem.hidden,
        problem.weight,
        problem.labels,
        temperature=problem.temperature,
        group=problem.group,
        with_entropy=with_entropy,
    )


def _ours_without_entropy(problem: Problem) -> Outputs:
    return _ours(problem, with_entropy=False)


def _openrlhf(problem: Problem) -> Outputs:
    """What upstream's ``Actor.forward`` does with logits. Its entropy needs no gradient here, which spares it memory."""
    from openrlhf.models.utils import compute_entropy, log_probs_from_logits

    logits = (problem.hidden @ problem.weight.t()).to(torch.float32)
    log_probs = log_probs_from_logits(logits, problem.labels, temperature=problem.temperature)
    with torch.no_grad():
        return log_probs, compute_entropy(logits)


class _Product:
    """The products alone, into memory that is there before: fresh pages would cost as much as a fourth of the time."""

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}

    @torch.no_grad()
    def one(self, problem: Problem) -> None:
        """The logits."""
        for hidden, logits in self._parts(problem):
            torch.mm(hidden, problem.weight.t(), out=logits)

    @torch.no_grad()
    def four(self, problem: Problem) -> None:
        """The logits, the logits again, and the two products with their gradient: what no way that keeps none can avoid."""
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
        """Consecutive tokens, and memory for their logits."""
        columns = problem.weight.size(0)
        parts = problem.hidden.split(max(1, _PRODUCT_BYTES // (columns * problem.weight.element_size())))
        memory = self._place("logits", problem.hidden, (len(parts[0]), columns))
        return [(part, memory[: len(part)]) for part in parts]

    def _place(self, name: str, like: Tensor, shape: Sequence[int]) -> Tensor:
        if name not in self._memory or self._memory[name].shape != torch.Size(shape):
            self._memory[name] = like.new_empty(shape)
        return self._memory[name]
