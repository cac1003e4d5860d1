"""Log-probability and entropy against float64, at every vocabulary, dtype, tile and shape of distribution."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.utils import counters

import openrlhf_gtpo.lm_head
from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy, portable
from openrlhf_gtpo.lm_head.portable import PortableTile
from openrlhf_gtpo.lm_head.projection import Settings
from openrlhf_gtpo.lm_head.shard import VocabularyShard
from tests.support.lm_head_reference import VOCABULARIES, log_prob_and_entropy, make_case, make_logits, naive

FLAT, ORDINARY, PEAKED = 0.0, 1.0, 12.0


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("scale", [FLAT, ORDINARY, PEAKED])
@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_float32_is_within_2e_5_of_float64(vocabulary, scale, tokens):
    case = make_case(tokens, 8, vocabulary, dtype=torch.float32, scale=scale)
    with torch.no_grad():
        log_prob, entropy = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, temperature=0.7)
        expected = naive(case.hidden, case.weight, case.labels, temperature=0.7)
    assert log_prob.dtype == entropy.dtype == torch.float32
    assert log_prob.shape == entropy.shape == (tokens,)
    torch.testing.assert_close(log_prob.double(), expected[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_float64_is_exact_and_temperature_bias_and_padding_count(vocabulary):
    case = make_case(5, 4, vocabulary + 77, real=vocabulary)
    arguments = {"temperature": 1.3, "bias": case.bias, "vocab_size": vocabulary}
    with torch.no_grad():
        log_prob, entropy = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, **arguments)
        expected = naive(case.hidden, case.weight, case.labels, **arguments)
    torch.testing.assert_close(log_prob, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [FLAT, ORDINARY, PEAKED])
def test_low_precision_is_no_worse_than_a_float32_softmax_over_the_same_product(dtype, scale):
    case = make_case(16, 64, 32000, dtype=dtype, scale=scale)
    with torch.no_grad():
        ours = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels)
        product = (case.hidden @ case.weight.t()).float()
        softmax = log_prob_and_entropy(product, case.labels)
        exact = naive(case.hidden, case.weight, case.labels)
        same_product = log_prob_and_entropy(product.double(), case.labels)
    for mine, theirs, truth, rounded in zip(ours, softmax, exact, same_product):
        assert (mine - truth).abs().max() <= (theirs - truth).abs().max() + 2e-6
        torch.testing.assert_close(mine.double(), rounded, rtol=0, atol=5e-6)


@pytest.mark.parametrize("gap", [10.0, 20.0, 30.0, 90.0, 120.0, 1000.0])
def test_an_almost_certain_token_has_a_tiny_entropy_and_never_a_negative_one(gap):
    """One column leads 150 equal ones by `gap`; gaps of 90 to 120 underflow float32."""
    weight = torch.zeros(151, 1)
    weight[7] = gap
    hidden, labels = torch.ones(2, 1), torch.tensor([7, 8])
    log_prob, entropy = linear_log_prob_and_entropy(hidden, weight, labels)
    expected = naive(hidden, weight, labels)
    torch.testing.assert_close(log_prob.double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0.06, atol=1e-30)
    assert (entropy >= 0).all() and (log_prob <= 0).all()


@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_a_constant_added_to_all_logits_changes_nothing(offset):
    case = make_case(4, 8, 999)
    shifted = case.bias + offset
    with torch.no_grad():
        one = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias)
        two = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=shifted)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-9)


def test_a_bias_of_minus_infinity_removes_columns_and_gradients_stay_finite():
    case = make_case(6, 8, 300, real=100)
    with torch.no_grad():
        case.bias[100:] = -math.inf
    results = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias, chunk_bytes=12000)
    expected = naive(case.hidden, case.weight[:100], case.labels, bias=case.bias[:100])
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
    for grad in torch.autograd.grad(results[0].sum() + results[1].sum(), case.leaves()):
        assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [20_000, 200_000, 2_000_000])
def test_the_budget_changes_the_tiles_and_not_the_result(dtype, chunk_bytes):
    case = make_case(37, 16, 5003, dtype=dtype)
    with torch.no_grad():
        whole = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias)
        chunked = linear_log_prob_and_entropy(
            case.hidden, case.weight, case.labels, bias=case.bias, chunk_bytes=chunk_bytes
        )
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(chunked, whole, rtol=0, atol=tolerance)


def test_a_row_of_logits_that_does_not_fit_is_split():
    case = make_case(3, 4, 151936, dtype=torch.bfloat16)
    settings_ = Settings(1.0, VocabularyShard(0, 151936, 151936, None), 20_000, True, False, PortableTile)
    assert settings_.forward_tile(case.hidden).columns < 151936


def test_without_entropy_the_log_prob_is_the_same():
    case = make_case(9, 8, 777, dtype=torch.float32)
    log_prob, none = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, with_entropy=False)
    assert none is None
    both = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels)
    torch.testing.assert_close(log_prob, both[0], rtol=0, atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 5),
    columns=st.integers(1, 300),
    padding=st.integers(0, 9),
    exponent=st.floats(-3, 3),
    temperature=st.floats(0.05, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    chunk_bytes=st.sampled_from([6_000, 50_000, 2**28]),
    seed=st.integers(0, 99),
)
def test_invariants(tokens, columns, padding, exponent, temperature, dtype, chunk_bytes, seed):
    """0 <= entropy <= ln V and log_prob <= 0, and neither is NaN, for logits of size 1e-3 to 1e3."""
    case = make_case(tokens, 4, columns + padding, dtype=dtype, real=columns, scale=10**exponent, seed=seed)
    with torch.no_grad():
        log_prob, entropy = linear_log_prob_and_entropy(
            case.hidden, case.weight, case.labels, temperature=temperature, vocab_size=columns, chunk_bytes=chunk_bytes
        )
    assert log_prob.isfinite().all() and (log_prob <= 0).all()
    assert (entropy >= 0).all() and (entropy <= torch.tensor(math.log(columns))).all()
    if columns == 1:
        assert (log_prob == 0).all() and (entropy == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [FLAT, ORDINARY, PEAKED])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_of_logits_that_exist_already_too(dtype, scale, temperature):
    """Padding follows the columns, and some columns are removed."""
    logits, labels, *exact = make_logits(37, 5001, dtype=dtype, scale=scale, temperature=temperature)
    before = logits.clone()
    found = openrlhf_gtpo.lm_head.log_prob_and_entropy(logits, labels, temperature=temperature)
    for mine, truth in zip(found, exact, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), truth, rtol=0, atol=2e-5)
    assert torch.equal(logits, before)


@pytest.mark.slow
def test_compiled_they_are_as_near_at_the_largest_vocabulary(monkeypatch):
    """As in vLLM's workers. Float32 sums over so many columns would be off by more. One row and many share a graph."""
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    portable._compiled_whole_rows.cache_clear()
    counters.clear()
    with torch._dynamo.config.patch(disable=False):
        for rows in (6, 1):
            logits, labels, *exact = make_logits(rows, 262144, dtype=torch.float32, scale=3.0, temperature=0.7)
            found = openrlhf_gtpo.lm_head.log_prob_and_entropy(
                logits.clone(memory_format=torch.contiguous_format), labels, temperature=0.7
            )
            for mine, truth in zip(found, exact, strict=True):
                torch.testing.assert_close(mine.double(), truth, rtol=0, atol=5e-6)
    portable._compiled_whole_rows.cache_clear()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_no_distribution_has_no_entropy(wrong):
    logits = torch.zeros(2, 5000)
    logits[0, 4000] = wrong
    values = openrlhf_gtpo.lm_head.log_prob_and_entropy(logits, torch.tensor([7, 7]), temperature=1.0)
    assert all(of_rows.isnan().tolist() == [True, False] for of_rows in values)
