"""Catches a checksum that misses swapped elements, a shift or a single bit, or depends on the device's order."""

from collections.abc import Iterable

import pytest
import torch

from openrlhf_gtpo.weight_sync.receipts import Arrivals, checksum


def wrapped(value: int) -> int:
    """``value`` as a signed integer of 64 bits."""
    return (value + 2**63) % 2**64 - 2**63


CHUNK = 2**20


def by_hand(tensor: torch.Tensor) -> int:
    """The formula with Python's integers; zeros add nothing."""
    total = 0
    elements = tensor.view(-1).view(torch.int16)
    for i in elements.nonzero().view(-1).tolist():
        chunk, place = divmod(i, CHUNK)
        key = wrapped((place + 1) * 0x9E3779B97F4A7C15)
        key = wrapped((key ^ (key >> 31)) * 0xBF58476D1CE4E5B9)
        total += int(elements[i]) * key * (2 * chunk + 1)
    return wrapped(total)


@pytest.mark.parametrize("shape", [(), (1,), (7, 3), (50, 41)])
def test_it_is_the_formula(shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert int(checksum(tensor)) == by_hand(tensor)


def test_it_is_the_formula_over_several_chunks() -> None:
    tensor = torch.zeros(2 * CHUNK + 500).bfloat16()
    generator = torch.Generator().manual_seed(0)
    for middle in (CHUNK, 2 * CHUNK):
        tensor[middle - 50 : middle + 50] = torch.randn(100, generator=generator).bfloat16()
    assert int(checksum(tensor)) == by_hand(tensor)
    swapped = tensor.clone()
    swapped[[1, CHUNK + 1]] = tensor[[CHUNK + 1, 1]]  # the same place of two chunks
    assert int(checksum(swapped)) == by_hand(swapped) != by_hand(tensor)


def test_any_change_shows() -> None:
    tensor = torch.randn(300, generator=torch.Generator().manual_seed(0)).bfloat16()
    seen = {int(checksum(tensor))}

    def add(changed: torch.Tensor) -> None:
        value = int(checksum(changed))
        assert value not in seen
        seen.add(value)

    for i in range(300):
        changed = tensor.clone()
        changed.view(torch.int16)[i] ^= 1  # the least bit
        add(changed)
    for i, j in [(0, 1), (3, 67), (10, 299), (64, 128)]:
        changed = tensor.clone()
        changed[[i, j]] = tensor[[j, i]]
        add(changed)
    for shift in (1, 64, 128):
        add(tensor.roll(shift))
    add(tensor.flip(0))
    add(torch.cat([torch.zeros(1).bfloat16(), tensor[:-1]]))
    add(tensor[:-1])
    add(torch.zeros_like(tensor))
    add(torch.full_like(tensor, -0.0))


class LatentAttention(torch.nn.Module):
    """Like vLLM's, which also holds part of a weight under another name that its loader does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_b_proj = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.o_proj = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.W_UV = torch.nn.Parameter(self.kv_b_proj.T.view(2, 3, 4)[1:].transpose(0, 1), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, tensor in weights if getattr(self, name).copy_(tensor) is not None}


def test_a_view_of_another_parameter_is_written_with_it() -> None:
    for names, missing in (
        (["kv_b_proj", "o_proj"], []),
        (["o_proj"], ["kv_b_proj", "W_UV"]),
        (["kv_b_proj"], ["o_proj"]),
    ):
        model = LatentAttention()
        arrivals = Arrivals(model)
        with arrivals.loading():
            model.load_weights((name, torch.zeros(4, 6)) for name in names)
        assert arrivals.receipt()[1] == missing


class Experts(torch.nn.Module):
    """Like vLLM's Qwen3MoeForCausalLM, whose loader has an earlier name for the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.routed_experts = torch.nn.Module()
        weight = torch.nn.Parameter(torch.ones(2, 4, 6, dtype=torch.bfloat16), requires_grad=False)
        self.experts.routed_experts.w13_weight = weight

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.experts.routed_experts.w13_weight.copy_(tensor)
        return {"model.mlp.experts.w13_weight"}


def test_experts_that_the_loader_calls_otherwise_are_written() -> None:
    model = torch.nn.Module()
    model.model = torch.nn.Module()
    model.model.mlp = Experts()
    model.load_weights = model.model.mlp.load_weights
    for values, missing in ((torch.zeros(2, 4, 6), []), (None, ["model.mlp.experts.routed_experts.w13_weight"])):
        arrivals = Arrivals(model)
        load_weights = model.load_weights
        with arrivals.loading():
            model.load_weights([("experts", values)] if values is not None else [])
        model.load_weights = load_weights
        assert arrivals.receipt()[1] == missing
