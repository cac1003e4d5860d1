"""The Triton kernels against the portable implementation; `test_lm_head_triton` runs this file in its own process.

Rows span several blocks and tiles: no row leaks into the next, blocks end where rows do, a label is found in its own
tile, and statistics are carried from tile to tile.
"""

import math

import pytest
import torch

from openrlhf_gtpo.lm_head import kernels, linear_log_prob_and_entropy, log_prob_and_entropy
from tests.support.lm_head_reference import gradients, make_case, make_logits, naive

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def several_blocks_a_row(monkeypatch):
    monkeypatch.setattr(kernels, "BLOCK_OF_FEW", 64)
    monkeypatch.setattr(kernels, "GRADIENT_BLOCK", 64)


def moved(case):
    for name in ("hidden", "weight", "bias", "labels"):
        tensor = getattr(case, name).detach().to(DEVICE)
        setattr(case, name, tensor.requires_grad_() if tensor.is_floating_point() else tensor)
    return case


def both(case, **arguments):
    return [
        linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, **arguments, implementation=name)
        for name in ("triton", "portable")
    ]


# Each pair of values occurs once: the interpreter takes seconds, a GPU none. Logits are flat, ordinary or peaked.
@pytest.mark.parametrize(
    ("dtype", "scale", "with_bias", "chunk_bytes", "tokens"),
    [
        (torch.float32, 1.0, True, 12_000, 21),
        (torch.float32, 12.0, False, 2**28, 21),
        (torch.float32, 0.0, False, 12_000, 1),
        (torch.bfloat16, 12.0, True, 12_000, 21),
        (torch.bfloat16, 0.0, True, 2**28, 21),
        (torch.bfloat16, 1.0, False, 2**28, 1),
        (torch.float16, 0.0, True, 12_000, 21),
        (torch.float16, 12.0, True, 2**28, 1),
        (torch.float16, 1.0, False, 12_000, 0),
    ],
)
def test_values_are_those_of_the_portable_one(dtype, scale, with_bias, chunk_bytes, tokens):
    case = moved(make_case(tokens, 8, 300, dtype=dtype, real=263, scale=scale))
    arguments = {"temperature": 0.7, "vocab_size": 263, "chunk_bytes": chunk_bytes}
    arguments["bias"] = case.bias if with_bias else None
    with torch.no_grad():
        ours, portable = both(case, **arguments)
        exact = naive(case.hidden, case.weight, case.labels, temperature=0.7, vocab_size=263, bias=arguments["bias"])
    torch.testing.assert_close(ours, portable, rtol=0, atol=1e-5)
    if dtype == torch.float32:
        for found, truth in zip(ours, exact):
            torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-5)
    assert (ours[0] <= 0).all() and (ours[1] >= 0).all() and (ours[1] <= math.log(263) + 1e-6).all()


@pytest.mark.parametrize(
    ("dtype", "scale", "temperature"),
    [(torch.float32, 12.0, 0.7), (torch.bfloat16, 1.0, 1.0), (torch.float16, 0.0, 0.7)],
)
def test_of_logits_that_exist_already_too(dtype, scale, temperature):
    logits, labels, *exact = make_logits(5, 1300, dtype=dtype, scale=scale, temperature=temperature)
    logits, labels = torch.nn.functional.pad(logits, (0, 9)).to(DEVICE)[:, :1300], labels.to(DEVICE)
    before = logits.clone()
    for implementation in ("triton", "portable"):
        found = log_prob_and_entropy(logits, labels, temperature=temperature, implementation=implementation)
        for mine, truth in zip(found, exact, strict=True):
            torch.testing.assert_close(mine.double().cpu(), truth, rtol=0, atol=2e-5)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_no_distribution_has_no_entropy(wrong):
    """A row that only begins with -inf keeps its entropy."""
    logits, labels = torch.zeros(3, 300, device=DEVICE), torch.tensor([7, 107, 107], device=DEVICE)
    logits[0, 200] = wrong
    logits[2, :100] = -math.inf
    for implementation in ("triton", "portable"):
        values = log_prob_and_entropy(logits, labels, temperature=1.0, implementation=implementation)
        assert all(of_rows.isnan().tolist() == [True, False, False] for of_rows in values)
        torch.testing.assert_close(values[1][2], torch.tensor(math.log(200.0), device=DEVICE))


@pytest.mark.parametrize(
    ("wanted", "dtype", "with_bias", "chunk_bytes"),
    [
        ("log_prob", torch.float32, False, 16_000),
        ("log_prob", torch.bfloat16, True, 2**28),
        ("entropy", torch.float32, True, 2**28),
        ("entropy", torch.bfloat16, False, 16_000),
        ("both", torch.float32, True, 16_000),
        ("both", torch.bfloat16, False, 2**28),
    ],
)
def test_gradients_are_those_of_the_naive_formula(wanted, dtype, with_bias, chunk_bytes):
    bound = 1e-5 if dtype == torch.float32 else 0.015
    case = moved(make_case(21, 24, 300, dtype=dtype, real=287))
    arguments = {"temperature": 0.8, "vocab_size": 287, "bias": case.bias if with_bias else None}
    ours = linear_log_prob_and_entropy(
        case.hidden, case.weight, case.labels, **arguments, chunk_bytes=chunk_bytes, implementation="triton"
    )
    exact = naive(case.hidden, case.weight, case.labels, **arguments)
    names = ("log_prob", "entropy")
    found, truth = (
        gradients(case, *(value if wanted in (name, "both") else None for name, value in zip(names, outputs)))
        for outputs in (ours, exact)
    )
    for mine, theirs in zip(found, truth):
        if theirs is None:
            assert mine is None
        else:
            error = (mine.double() - theirs.double()).abs().max()
            assert error <= bound * theirs.double().abs().max().clamp_min(1e-30)
    assert (found[1][287:] == 0).all()


def test_removed_columns_stay_removed():
    case = moved(make_case(6, 8, 300, dtype=torch.float32, real=100))
    with torch.no_grad():
        case.bias[100:] = -math.inf
    ours = linear_log_prob_and_entropy(
        case.hidden, case.weight, case.labels, bias=case.bias, chunk_bytes=12_000, implementation="triton"
    )
    exact = naive(case.hidden, case.weight[:100], case.labels, bias=case.bias[:100])
    for found, truth in zip(ours, exact):
        torch.testing.assert_close(found.double(), truth, rtol=0, atol=2e-5)
    for grad in torch.autograd.grad(ours[0].sum() + ours[1].sum(), case.leaves()):
        assert grad.isfinite().all()


def test_without_entropy_the_log_prob_is_the_same():
    case = moved(make_case(9, 8, 777, dtype=torch.float32))
    (log_prob, none), (expected, _) = both(case, with_entropy=False)
    assert none is None
    torch.testing.assert_close(log_prob, expected, rtol=0, atol=1e-6)


def test_float64_is_portable():
    case = moved(make_case(4, 8, 50))
    ours, portable = both(case)
    assert ours[0].dtype == torch.float64
    torch.testing.assert_close(ours, portable, rtol=0, atol=0)
