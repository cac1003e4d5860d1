"""The emulated product: which matrices are quantized, along which dimension, with which step's scales, and how long a
quantized weight is kept.
"""

from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.megatron.fp8.fp8 import EmulatedLinear
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.fp8.quantize import COLUMNS, ROWS, SQUARES
from tests.support.fp8_reference import scale, there_and_back

ALONE: dict[str, Any] = {"sequence_parallel": False, "allreduce_dgrad": False, "tp_group": None}
ROWS_, INNER, OUTER = 150, 140, 33  # none a multiple of 128


def exact(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **unused: Any) -> torch.Tensor:
    return torch.nn.functional.linear(input, weight, bias)


def make(recipe: str, **options: Any) -> EmulatedLinear:
    return EmulatedLinear(Fp8Options("emulated", recipe), exact, **options)


def matrices(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and the gradient of the product, of uneven magnitudes."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 10 ** (2 * torch.rand(shape, generator=generator))

    return draw(ROWS_, INNER), draw(OUTER, INNER) * 1e-2, draw(ROWS_, OUTER) * 1e-6


def run(linear: EmulatedLinear, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> list[np.ndarray]:
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = linear(x.unsqueeze(1), w, None, **ALONE)
    assert y.shape == (x.shape[0], 1, w.shape[0])
    y.backward(dy.unsqueeze(1))
    return [tensor.detach().double().numpy() for tensor in (y.squeeze(1), x.grad, w.grad)]


def by_the_book(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, recipe: str, factors: Any = (None,) * 3) -> list:
    blocks = (ROWS, COLUMNS, SQUARES) if recipe == "blockwise" else (None, None, None)
    of_gradient = "e4m3" if recipe == "blockwise" else "e5m2"
    x_, w_, dy_ = (tensor.double().numpy() for tensor in (x, w, dy))
    along_rows, along_columns, squares = blocks
    weight = there_and_back(w_, "e4m3", squares, factors[1])
    return [
        there_and_back(x_, "e4m3", along_rows, factors[0]) @ weight.T,
        there_and_back(dy_, of_gradient, along_rows, factors[2]) @ weight,
        there_and_back(dy_, of_gradient, along_columns, factors[2]).T
        @ there_and_back(x_, "e4m3", along_columns, factors[0]),
    ]


def close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_the_three_products_are_those_of_a_loop(recipe: str) -> None:
    x, w, dy = matrices()
    close(run(make(recipe), x, w, dy), by_the_book(x, w, dy, recipe))


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_in_bfloat16_only_its_own_rounding_is_added(recipe: str) -> None:
    x, w, dy = (matrix.bfloat16() for matrix in matrices())
    in_float32 = run(make(recipe), x.float(), w.float(), dy.float())
    for found, expected in zip(run(make(recipe), x, w, dy), in_float32, strict=True):
        assert 0 < np.linalg.norm(found - expected) < 2**-8 * np.linalg.norm(expected)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_without_fp8_it_is_the_layer_itself(recipe: str) -> None:
    x, w, dy = matrices()
    linear = make(recipe)
    linear.enabled = False
    for found, expected in zip(run(linear, x, w, dy), (x @ w.T, dy @ w, dy.T @ x), strict=True):
        np.testing.assert_allclose(found, expected.double().numpy(), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(("use_max", "history"), [(False, 1), (False, 3), (True, 3)])
def test_delayed_scales_are_those_of_earlier_steps(use_max: bool, history: int) -> None:
    linear = make("delayed", history=history, use_max=use_max)
    seen: list[list[float]] = []
    factors = [1.0, 1.0, 1.0]
    for step in range(5):
        x, w, dy = (tensor * (step % 3 + 1) * 10 for tensor in matrices(step))
        close(run(linear, x, w, dy), by_the_book(x, w, dy, "delayed", factors))
        assert linear.scale.tolist() == pytest.approx(factors)  # nothing moves within a step
        seen.append([float(tensor.abs().max()) for tensor in (x, w, dy)])
        linear.update_scales()
        window = seen[-history:] if use_max else seen[-1:]
        formats = ("e4m3", "e4m3", "e5m2")
        factors = [float(scale(max(row[i] for row in window), formats[i])) for i in range(3)]


def test_an_amax_of_zero_or_infinity_moves_no_scale() -> None:
    linear = make("delayed")
    linear.scale.copy_(torch.tensor([2.0, 3.0, 5.0]))
    linear.amax_history[:, 0] = torch.tensor([0.0, float("inf"), 57344.0])
    linear.update_scales()
    assert linear.scale.tolist() == [2.0, 3.0, 1.0] and not linear.amax_history.any()


def test_the_margin_leaves_room() -> None:
    linear = make("delayed", margin=2)
    linear.amax_history[:, 0] = 1.0
    linear.update_scales()
    assert linear.scale.tolist() == [112.0, 112.0, 14336.0]


def test_a_weight_is_kept_only_while_it_may_be() -> None:
    x, w, _ = matrices()
    linear = make("blockwise")

    def product(weight: torch.Tensor) -> torch.Tensor:
        return linear(x, weight, None, **ALONE)

    linear.keep_weight(True)
    first = product(w)
    with torch.no_grad():
        w.mul_(-2)
    assert torch.equal(product(w), first)  # kept
    linear.keep_weight(False)
    assert torch.equal(product(w), -2 * first)
    with torch.no_grad():
        w.mul_(-2)
    assert torch.equal(product(w), 4 * first)  # no longer kept


def test_a_bias_is_added_and_frozen_weights_get_no_gradient() -> None:
    x, w, _ = matrices()
    linear, bias = make("tensorwise"), torch.arange(float(OUTER))
    product = linear(x, w, bias, **ALONE)
    assert torch.equal(product, linear(x, w, None, **ALONE) + bias)
    x.requires_grad_()
    linear(x, w, bias, **ALONE).sum().backward()
    assert x.grad is not None and w.grad is None
