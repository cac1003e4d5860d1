"""The naive formula in float64, and the inputs the tests share."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

VOCABULARIES = (151, 32000, 49152, 151936, 152064)


def naive(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """log_prob (T,) and entropy (T,) from a float64 softmax over float64 logits; differentiable by autograd."""
    logits = hidden.double() @ weight.double().t()
    if bias is not None:
        logits = logits + bias.double()
    return log_prob_and_entropy((logits / temperature)[:, :vocab_size], labels)


def log_prob_and_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """log_prob (T,) and entropy (T,) of logits (T, V), in their dtype."""
    log_p = torch.log_softmax(logits, dim=1)
    log_prob = log_p.gather(1, labels.unsqueeze(1)).squeeze(1)
    return log_prob, -(log_p.exp() * log_p).sum(1)


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    bias: Tensor
    labels: Tensor

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.hidden, self.weight, self.bias


def make_case(
    tokens: int,
    width: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float64,
    real: int | None = None,
    scale: float = 1.0,
    seed: int = 0,
) -> Case:
    """Random inputs whose logits have a standard deviation of about `scale`; labels are below `real`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    case = Case(
        hidden=(normal(tokens, width) * scale / width**0.5).to(dtype),
        weight=normal(columns, width).to(dtype),
        bias=(normal(columns) * scale).to(dtype),
        labels=torch.randint(real or columns, (tokens,), generator=generator),
    )
    for leaf in case.leaves():
        leaf.requires_grad_()
    return case


def make_logits(
    tokens: int, columns: int, *, dtype: torch.dtype, scale: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits (T, V), labels (T,), and their log_prob and entropy (T,) in float64. Logits are a view into wider rows; a
    tenth of them is -inf, as are the first 1000 columns, but never a label's."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.randn(tokens, columns + 63, generator=generator) * scale + 20
    logits = padded.to(dtype)[:, :columns]
    labels = torch.randint(1000, columns, (tokens,), generator=generator)
    removed = torch.rand(logits.shape, generator=generator) < 0.1
    removed[:, :1000] = True
    logits.masked_fill_(removed.scatter_(1, labels.unsqueeze(1), False), -math.inf)
    log_p = torch.log_softmax(logits.double() / temperature, dim=1)
    return logits, labels, log_p.gather(1, labels.unsqueeze(1)).squeeze(1), torch.special.entr(log_p.exp()).sum(1)


def gradients(case: Case, log_prob: Tensor | None, entropy: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for hidden, weight and bias of a loss that weights every token of either output differently."""
    loss = torch.zeros((), dtype=torch.float64)
    for output, phase in ((log_prob, 0.3), (entropy, 1.7)):
        if output is not None:
            loss = loss + (output.double() * torch.sin(torch.arange(output.numel()) + phase)).sum()
    return torch.autograd.grad(loss, case.leaves(), allow_unused=True)
