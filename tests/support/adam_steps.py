"""Ten steps of an Adam, to compare two of them."""

from typing import Any

import torch

SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def steps_of(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> torch.Tensor:
    """``weight`` after ten steps, with gradients that shrink."""
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        weight.grad = (torch.randn(1000, generator=generator) * 0.5**step).to(weight)
        optimizer.step()
    return weight.detach()
