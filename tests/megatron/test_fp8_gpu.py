"""Transformer Engine's FP8 on a CUDA device against its emulation: rounding, blocks, and the matrices multiplied."""

import importlib.util
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import openrlhf_gtpo.megatron  # noqa: F401  before Transformer Engine, for which it sets a variable
from openrlhf_gtpo.megatron.fp8.quantize import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    SQUARES,
    amax_of,
    quantize,
    quantize_blocks,
    scale_of,
)
from tests.megatron.test_fp8_linear import ALONE, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
]


def uneven(*shape: int) -> torch.Tensor:
    """A bfloat16 matrix over four powers of ten, with one block of zeros."""
    generator = torch.Generator("cuda").manual_seed(0)
    found = torch.randn(shape, generator=generator, device="cuda")
    found *= 10 ** (4 * torch.rand(shape, generator=generator, device="cuda") - 2)
    found[:128, :128] = 0
    return found.bfloat16()


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_a_product_is_the_emulated_one(recipe: str) -> None:
    """Checks a layer's output and both gradients: a whole model would magnify bfloat16's rounding as much as FP8's."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling

    x, w, dy = uneven(256, 384), uneven(512, 384), uneven(256, 512)
    layer = te.Linear(384, 512, bias=False, params_dtype=torch.bfloat16, device="cuda")
    x.requires_grad_()
    with torch.no_grad():
        layer.weight.copy_(w)
    with te.autocast(enabled=True, recipe=Float8BlockScaling() if recipe == "blockwise" else Float8CurrentScaling()):
        y = layer(x)
    y.backward(dy)
    theirs = y.detach(), x.grad, layer.weight.grad
    x, w = x.detach().float().requires_grad_(), w.float().requires_grad_()
    y = make(recipe)(x.unsqueeze(1), w, None, **ALONE).squeeze(1)
    y.backward(dy.float())
    exact = x.detach() @ w.detach().T, dy.float() @ w.detach(), dy.float().T @ x.detach()
    for found, emulated, without in zip(theirs, (y.detach(), x.grad, w.grad), exact, strict=True):
        found, emulated, without = (t.double().cpu().numpy() for t in (found, emulated, without))
        assert np.linalg.norm(found - emulated) < 0.3 * np.linalg.norm(without - emulated)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_one_scale_rounds_as_the_emulation_does(dtype: torch.dtype) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.constants import TE_DType

    matrix = uneven(256, 384)
    theirs = te.Float8CurrentScalingQuantizer(TE_DType[dtype], device=matrix.device, columnwise=False)(matrix)
    ours = quantize(matrix, dtype, scale_of(amax_of(matrix), dtype))
    assert torch.equal(theirs._data.view(torch.uint8), ours.data.view(torch.uint8))
    torch.testing.assert_close(theirs._scale_inv, ours.scale.reciprocal().view(1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim, by_rows, by_columns", [(1, ROWS, COLUMNS), (2, SQUARES, SQUARES)])
def test_blocks_round_as_the_emulation_s_do(dim: int, by_rows: Any, by_columns: Any) -> None:
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8BlockScaling
    from transformer_engine.pytorch.constants import TE_DType

    assert not Float8BlockScaling().fp8_quant_fwd_inp.power_2_scale, "the recipe rounds scales to powers of two"
    matrix = uneven(256, 384)
    quantizer = te.Float8BlockQuantizer(
        TE_DType[E4M3], rowwise=True, columnwise=True, force_pow_2_scales=False, block_scaling_dim=dim
    )
    theirs = quantizer(matrix)
    for data, block in ((theirs._rowwise_data, by_rows), (theirs._columnwise_data.T, by_columns)):
        ours = quantize_blocks(matrix, E4M3, block)
        assert torch.equal(data.view(torch.uint8), ours.data.view(torch.uint8))


# In a worker's order: this package, then OpenRLHF (which imports PEFT, hence Transformer Engine), and Megatron last.
IN_FORCE = """
import importlib.util
import openrlhf_gtpo
if importlib.util.find_spec("peft"):
    import peft
import transformer_engine.pytorch as te
import torch
import openrlhf_gtpo.megatron.train.trainer
from transformer_engine.common.recipe import Float8BlockScaling

layer = te.Linear(256, 256, params_dtype=torch.bfloat16, device="cuda")
with te.autocast(enabled=True, recipe=Float8BlockScaling()):
    layer(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16))
for quantizer in layer.quantizers["scaling_fwd"][:2]:
    quantized = quantizer(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16))
    fractions = torch.frexp(quantized._rowwise_scale_inv[:2, :2])[0]  # what lies beyond may be padding
    assert (fractions != 0.5).any(), "scales are powers of two"
"""


def test_a_worker_s_blocks_have_scales_that_are_no_powers_of_two() -> None:
    ended = subprocess.run([sys.executable, "-c", IN_FORCE], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
