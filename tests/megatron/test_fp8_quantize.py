"""Rounding to FP8 and back against a float64 search over all numbers of the format, with one scale and with blocks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.support.fp8_reference import FORMATS, numbers, rounded, there_and_back

DTYPES = {"e4m3": E4M3, "e5m2": E5M2}


@pytest.mark.parametrize("name", DTYPES)
def test_the_reference_knows_the_format(name: str) -> None:
    bits = torch.arange(256, dtype=torch.uint8).view(DTYPES[name]).double()
    known = sorted(set(bits[bits.isfinite() & (bits >= 0)].tolist()))
    assert known == numbers(name).tolist()


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=300, deadline=None)
@given(value=st.floats(-1e5, 1e5, width=32))
def test_values_go_to_the_nearest_number(name: str, value: float) -> None:
    found = quantize(torch.tensor([[value]]), DTYPES[name], torch.ones(())).data.double().item()
    assert found == rounded(np.array([value]), name)[0]


@pytest.mark.parametrize("name", DTYPES)
def test_halfway_values_go_to_the_even_number(name: str) -> None:
    table = numbers(name)
    halfway = torch.tensor((table[1:] + table[:-1])[None] / 2, dtype=torch.float32)
    found = quantize(halfway, DTYPES[name], torch.ones(())).data.double().numpy()[0]
    assert found.tolist() == [table[i if i % 2 == 0 else i + 1] for i in range(len(table) - 1)]


@pytest.mark.parametrize("name", DTYPES)
def test_too_large_values_saturate(name: str) -> None:
    values = torch.tensor([[1e9, -1e9, float("inf"), -float("inf")]])
    largest = FORMATS[name][3]
    found = quantize(values, DTYPES[name], torch.ones(())).dequantize()
    assert found.tolist() == [[largest, -largest, largest, -largest]]


@pytest.mark.parametrize("name", DTYPES)
def test_scales_of_every_kind_of_amax(name: str) -> None:
    largest = FORMATS[name][3]
    amax = torch.tensor([0.0, float("inf"), float("nan"), 2.0, 1e-44, largest])
    found = scale_of(amax, DTYPES[name]).tolist()
    assert found == [1.0, 1.0, 1.0, largest / 2, torch.finfo(torch.float32).max, 1.0]
    assert scale_of(amax[4:5], DTYPES[name], torch.bfloat16) == torch.finfo(torch.bfloat16).max


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("block", [None, ROWS, COLUMNS, SQUARES])
@pytest.mark.parametrize("shape", [(130, 131), (1, 128), (128, 1), (3, 257)])
def test_blocks_are_those_of_a_loop(name: str, block: tuple[int, int] | None, shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(3)
    # Magnitudes over six powers of ten, so that a scale from another block shows.
    matrix = torch.randn(shape, generator=generator) * 10 ** (6 * torch.rand(shape, generator=generator) - 4)
    matrix = matrix.bfloat16()
    dtype = DTYPES[name]
    if block is None:
        found = quantize(matrix, dtype, scale_of(amax_of(matrix), dtype))
    else:
        found = quantize_blocks(matrix, dtype, block)
    expected = there_and_back(matrix.double().numpy(), name, block)
    np.testing.assert_allclose(found.dequantize().double().numpy(), expected, rtol=1e-6, atol=0)


def test_a_block_of_zeros_stays_zero() -> None:
    matrix = torch.zeros(4, 256)
    matrix[:, 128:] = 3.0
    found = quantize_blocks(matrix, E4M3, ROWS)
    assert torch.equal(found.dequantize(), matrix)
    assert found.scale[:, 0].tolist() == [1.0] * 4


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 128), (5, 0)):
        matrix = torch.zeros(shape)
        assert amax_of(matrix) == 0
        for block in (ROWS, COLUMNS, SQUARES):
            assert quantize_blocks(matrix, E4M3, block).dequantize().shape == shape


def test_numbers_of_the_format_come_back_as_they_were() -> None:
    table = torch.tensor(numbers("e4m3"), dtype=torch.float32)[None] * 2.0**-5
    found = quantize(table, E4M3, torch.tensor(2.0**5))
    assert torch.equal(found.dequantize(), table)
