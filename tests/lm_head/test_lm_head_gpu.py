"""On a CUDA device, at sizes that need one: products are added in float32, indices exceed 32 bits, and memory stays
within the budget.
"""

import pytest
import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from openrlhf_gtpo.platform.memory import PeakMemory

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, WIDTH, COLUMNS = 32768, 5120, 152064  # logits of 10 GB in bfloat16, more than 2**32 of them
BUDGET = 256 * 2**20


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    hidden, weight = normal(TOKENS, WIDTH) * (3 / WIDTH**0.5), normal(COLUMNS, WIDTH)
    labels = torch.randint(COLUMNS, (TOKENS,), generator=generator, device="cuda")
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    return hidden.requires_grad_(), weight.requires_grad_(), labels


@pytest.mark.parametrize("tokens", [33, TOKENS])
def test_values_are_those_of_float64(inputs, tokens):
    hidden, weight, labels = inputs
    with torch.no_grad():
        log_prob, entropy = linear_log_prob_and_entropy(hidden[-tokens:], weight, labels[-tokens:], temperature=0.8)
        some = slice(-16, None)
        logits = torch.cat([hidden[some].double() @ part.double().t() for part in weight.split(8192)], 1) / 0.8
        log_p = logits.log_softmax(1)
        rounded = [(hidden[some] @ part.t()).double() for part in weight.split(8192)]
        same_product = (torch.cat(rounded, 1) / 0.8).log_softmax(1)
    label = labels[some, None]
    for found, exact, product in (
        (log_prob, log_p.gather(1, label)[:, 0], same_product.gather(1, label)[:, 0]),
        (entropy, -(log_p.exp() * log_p).sum(1), -(same_product.exp() * same_product).sum(1)),
    ):
        # No further from float64 than an exact softmax over the same bfloat16 logits, up to its own rounding.
        assert (found[some] - exact).abs().max() <= (product - exact).abs().max() + 2e-5


@pytest.mark.parametrize("what", ["forward", "returned", "main_grad"])
def test_peak_memory_stays_within_the_budget(inputs, what):
    hidden, weight, labels = inputs

    def run(tokens):
        hidden.grad = weight.grad = None
        rows = hidden[:tokens].detach().requires_grad_()
        memory = PeakMemory()
        with torch.set_grad_enabled(what != "forward"):
            outputs = linear_log_prob_and_entropy(
                rows, weight, labels[:tokens], chunk_bytes=BUDGET, accumulate_into_main_grad=what == "main_grad"
            )
        if what != "forward":
            outputs[0].sum().backward()
        results = [*outputs, *(leaf.grad for leaf in (rows, weight) if leaf.grad is not None)]
        return memory.beyond() - sum(tensor.nbytes for tensor in results)

    run(256)  # cuBLAS's workspace and the compiled kernels
    # Megatron's convention returns an empty weight gradient beside the main one; a few numbers per token are extra.
    assert run(TOKENS) <= 1.1 * BUDGET + 64 * TOKENS


def test_gradients_are_summed_in_float32(inputs):
    """At budgets that differ a hundredfold, one call adds up thousands of partial products and the other a few."""
    hidden, weight, labels = inputs
    gradients = []
    for budget in (24 * 2**20, 2**31):
        rows = hidden[:4096].detach().requires_grad_()
        weight.grad = None
        log_prob, _ = linear_log_prob_and_entropy(rows, weight, labels[:4096], chunk_bytes=budget)
        log_prob.sum().backward()
        gradients.append((rows.grad.float(), weight.grad.float()))
    for many, few in zip(*gradients):
        assert (many - few).abs().max() <= 0.02 * few.abs().max()
