"""The backward pass against autograd of the naive formula, and what it keeps, adds to and plans."""

import functools

import pytest
import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy, tiles
from openrlhf_gtpo.lm_head.portable import PortableTile
from openrlhf_gtpo.lm_head.projection import Settings, plan_sweeps
from openrlhf_gtpo.lm_head.shard import VocabularyShard
from tests.support.lm_head_reference import gradients, make_case, naive

WANTED = [(True, False), (False, True), (True, True)]


def relative_error(ours, expected):
    if expected.numel() == 0:
        return 0.0
    return float((ours.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-30))


@pytest.mark.parametrize("wanted", WANTED, ids=["log_prob", "entropy", "both"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.015)])
@pytest.mark.parametrize("chunk_bytes", [25_000, 2**28])
@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_gradients_equal_those_of_the_naive_formula(wanted, dtype, bound, chunk_bytes, tokens):
    case = make_case(tokens, 24, 611, dtype=dtype, real=600)
    arguments = {"temperature": 0.8, "bias": case.bias, "vocab_size": 600}
    results = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, **arguments, chunk_bytes=chunk_bytes)
    expected = naive(case.hidden, case.weight, case.labels, **arguments)

    def keep(pair):
        return [output if want else None for output, want in zip(pair, wanted)]

    ours, theirs = gradients(case, *keep(results)), gradients(case, *keep(expected))
    for mine, truth, leaf in zip(ours, theirs, case.leaves()):
        assert mine.dtype == dtype and mine.shape == leaf.shape
        assert relative_error(mine, truth) <= bound
    assert (ours[1][600:] == 0).all() and (ours[2][600:] == 0).all()


@pytest.mark.parametrize("with_entropy", [False, True])
def test_gradcheck(with_entropy):
    case = make_case(3, 4, 17)

    def function(hidden, weight, bias):
        outputs = linear_log_prob_and_entropy(
            hidden, weight, case.labels, bias=bias, temperature=1.4, with_entropy=with_entropy, chunk_bytes=3000
        )
        return outputs if with_entropy else outputs[0]

    assert torch.autograd.gradcheck(function, case.leaves())


@pytest.mark.parametrize("frozen", range(3))
def test_a_frozen_input_gets_no_gradient_and_the_others_the_same(frozen):
    case = make_case(8, 6, 90)
    full = gradients(case, *linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias))
    case.leaves()[frozen].requires_grad_(False)
    log_prob, entropy = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias)
    factors = [torch.sin(torch.arange(8) + phase) for phase in (0.3, 1.7)]
    ((log_prob * factors[0]).sum() + (entropy * factors[1]).sum()).backward()
    for index, leaf in enumerate(case.leaves()):
        if index == frozen:
            assert leaf.grad is None
        else:
            torch.testing.assert_close(leaf.grad, full[index])


def test_a_hundred_bfloat16_turns_lose_nothing_against_one():
    """Gradients are summed in float32: small budgets, hence many partial products, do not make them coarser."""
    case = make_case(200, 16, 4096, dtype=torch.bfloat16)
    truth = gradients(case, naive(case.hidden, case.weight, case.labels)[0], None)
    errors = []
    for chunk_bytes in (60_000, 2**28):
        log_prob, _ = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, chunk_bytes=chunk_bytes)
        ours = gradients(case, log_prob, None)
        errors.append([relative_error(mine, exact) for mine, exact in zip(ours[:2], truth[:2])])
    for many, one in zip(*errors):
        assert many <= 2 * one + 1e-3


def test_two_numbers_a_token_are_kept_beside_the_inputs():
    case = make_case(50, 8, 2000, dtype=torch.float32)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        outputs = linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, bias=case.bias)
    inputs = {leaf.data_ptr() for leaf in case.leaves()}
    extra = [tensor for tensor in kept if tensor.data_ptr() not in inputs and tensor.is_floating_point()]
    assert sum(tensor.numel() for tensor in extra) == 2 * 50
    assert outputs[1].data_ptr() in {tensor.data_ptr() for tensor in extra}, "the entropy is kept once, as the output"


class TestMainGradient:
    @pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("chunk_bytes", [20_000, 2**28])
    def test_is_added_to_instead_of_returned(self, main_dtype, chunk_bytes):
        case = make_case(300, 16, 500, dtype=torch.bfloat16, real=480)
        arguments = {"vocab_size": 480, "chunk_bytes": chunk_bytes}
        expected = gradients(case, *naive(case.hidden, case.weight, case.labels, vocab_size=480))
        case.weight.main_grad = torch.ones(500, 16, dtype=main_dtype)
        outputs = linear_log_prob_and_entropy(
            case.hidden, case.weight, case.labels, **arguments, accumulate_into_main_grad=True
        )
        d_hidden, d_weight, _ = gradients(case, *outputs)
        assert d_weight is None
        assert relative_error(d_hidden, expected[0]) < 0.015
        assert relative_error(case.weight.main_grad.float() - 1, expected[1]) < 0.015
        assert (case.weight.main_grad[480:] == 1).all()

    @pytest.mark.parametrize("zero", [False, True])
    def test_is_reported_the_way_megatron_does(self, zero):
        case = make_case(5, 4, 30, dtype=torch.float32)
        case.weight.main_grad = torch.zeros(30, 4)
        case.weight.grad_added_to_main_grad = False
        case.weight.zero_out_wgrad = zero
        log_prob, _ = linear_log_prob_and_entropy(
            case.hidden, case.weight, case.labels, accumulate_into_main_grad=True
        )
        log_prob.sum().backward()
        assert case.weight.grad_added_to_main_grad
        assert case.weight.grad.shape == case.weight.shape
        assert not zero or (case.weight.grad == 0).all()
        expected = gradients(case, naive(case.hidden, case.weight, case.labels)[0] * 0, None)
        assert expected[1].shape == case.weight.main_grad.shape and case.weight.main_grad.abs().sum() > 0

    def test_missing_is_an_error_only_where_a_gradient_is_due(self):
        case = make_case(5, 4, 30)
        with torch.no_grad():
            linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, accumulate_into_main_grad=True)
        with pytest.raises(ValueError, match="main_grad"):
            linear_log_prob_and_entropy(case.hidden, case.weight, case.labels, accumulate_into_main_grad=True)


class TestPlan:
    """Four products wherever they fit; five only for a bfloat16 gradient of the weight and a long d_hidden."""

    def sweeps(self, tokens, chunk_bytes, dtype=torch.bfloat16, weight_dtype=torch.bfloat16, needs_hidden=True):
        settings = Settings(1.0, VocabularyShard(0, 100, 100, None), chunk_bytes, True, False, PortableTile)
        weight = None if weight_dtype is None else torch.empty(100, 64, dtype=weight_dtype)
        return plan_sweeps(torch.empty(tokens, 64, dtype=dtype), weight, needs_hidden, settings)

    def test_one_sweep_where_the_accumulator_fits(self):
        assert len(self.sweeps(1000, 2**28)) == 1
        assert len(self.sweeps(10**6, 2**20, dtype=torch.float32, weight_dtype=torch.float32)) == 1
        assert len(self.sweeps(10**6, 2**20, needs_hidden=False)) == 1
        assert self.sweeps(0, 2**20) == []

    def test_a_device_has_large_tiles(self):
        """The head of Qwen2.5-32B at TP8."""
        tokens, width, columns, budget = 12288, 5120, 19072, tiles.default_budget(on_cpu=False)
        assert tokens * width * 4 <= budget * tiles.ACCUMULATOR_SHARE, "one turn"
        sizes = {"per_logit": 2, "width": width, "item": 2, "wide": 4, "adds_in_place": True, "direct_from": None}
        needed = functools.partial(tiles.backward_bytes, **sizes)
        assert tiles.choose_tile(tokens, columns, budget - tokens * width * 4, False, needed) == tiles.Tile(
            8192, columns
        )

    def test_every_gradient_sees_every_token_once(self):
        for weight_dtype in (torch.bfloat16, torch.float32, None):
            sweeps = self.sweeps(10_000, 2**20, weight_dtype=weight_dtype)
            assert len(sweeps) > 1
            for wanted in ("adds_hidden", "adds_weight"):
                seen = [t for sweep in sweeps if getattr(sweep, wanted) for t in range(10_000)[sweep.tokens]]
                assert seen == list(range(10_000))

    def test_a_float32_main_gradient_spares_the_fifth_product(self):
        assert all(sweep.adds_hidden for sweep in self.sweeps(10_000, 2**20, weight_dtype=torch.float32))
        assert not self.sweeps(10_000, 2**20)[-1].adds_hidden
