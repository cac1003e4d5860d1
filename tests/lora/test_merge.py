"""These tests catch a merge that loses small updates, drifts, or depends on how a matrix is cut."""

import pytest
import torch

from openrlhf_gtpo.lora.merge import merge, thresholds

NAME = "model.layers.3.self_attn.q_proj.weight"


def adapters(out: int, into: int, rank: int = 8, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(out * into)
    a = torch.randn(rank, into, generator=generator)
    return a.bfloat16(), (size * torch.randn(out, rank, generator=generator)).bfloat16()


def weight(out: int, into: int) -> torch.Tensor:
    return (0.02 * torch.randn(out, into, generator=torch.Generator().manual_seed(1))).bfloat16()


def rounded_up_if(exact: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Of each element the bfloat16 below or above it in magnitude, by the part in between and the threshold."""
    below = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)
    above = ((exact.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32)
    part = (exact.double() - below.double()) / (above.double() - below.double())
    return torch.where(part >= 1 - threshold.double() / 65536, above, below).bfloat16()


@pytest.mark.parametrize("shape", [(70, 90), (3, 2**16)], ids=["one block", "two blocks"])
def test_rounds_each_element_by_its_threshold(shape):
    base, (a, b) = weight(*shape), adapters(*shape, size=1e-4)
    exact = torch.addmm(base.float(), b.float(), a.float(), alpha=2.0)
    assert torch.equal(merge(base, a, b, 2.0, NAME), rounded_up_if(exact, thresholds(shape, NAME)))


def test_zero_changes_no_bit():
    base, (a, b) = weight(70, 90), adapters(70, 90)
    assert torch.equal(merge(base, a, torch.zeros_like(b), 2.0, NAME), base)


def test_float32_is_exact():
    base, (a, b) = weight(70, 90).float(), adapters(70, 90)
    torch.testing.assert_close(merge(base, a, b, 0.5, NAME), base + 0.5 * b.float() @ a.float())


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4])
def test_keeps_updates_far_below_the_grid(size):
    base, (a, b) = weight(512, 700), adapters(512, 700, size=size)
    delta = 2.0 * b.double() @ a.double()

    def kept(merged: torch.Tensor) -> float:
        return float(((merged.double() - base.double()) * delta).sum() / (delta * delta).sum())

    assert abs(kept(merge(base, a, b, 2.0, NAME)) - 1) < 0.02
    if size < 1e-5:  # which nearest rounding does not
        assert abs(kept((base.double() + delta).bfloat16()) - 1) > 0.05


def test_a_larger_step_never_gives_a_smaller_weight():
    base, (a, b) = weight(70, 90), adapters(70, 90, size=1e-4)
    up = (b.float() @ a.float()) > 0
    before = base
    for scale in (0.1, 0.2, 1.0, 7.0):
        merged = merge(base, a, b, scale, NAME)
        assert (merged >= before)[up].all() and (merged <= before)[~up].all()
        before = merged


@pytest.mark.parametrize(("rows", "columns"), [((0, 23), (0, 90)), ((23, 70), (0, 90)), ((0, 70), (31, 90))])
def test_a_part_is_merged_as_in_the_whole(rows, columns):
    base, (a, b) = weight(70, 90), adapters(70, 90, size=1e-3)
    whole = merge(base, a, b, 2.0, NAME)
    here = slice(*rows), slice(*columns)
    part = merge(base[here].contiguous(), a[:, here[1]].contiguous(), b[here[0]], 2.0, NAME, (rows[0], columns[0]))
    assert torch.equal(part, whole[here])


def test_thresholds_are_uniform_and_of_each_matrix_its_own():
    one, other = (thresholds((400, 500), name).double() for name in (NAME, NAME.replace("q_", "k_")))
    assert (one.min(), one.max()) >= (0, 65_000) and one.max() <= 65_535
    assert abs(one.mean() / 65536 - 0.5) < 0.005 and abs(one.std() / 65536 - 12**-0.5) < 0.005
    pairs = [(one, other), (one[1:], one[:-1]), (one[:, 1:], one[:, :-1]), (one[1:, 1:], one[:-1, :-1])]
    for first, second in pairs:
        correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
        assert abs(correlation) < 0.01
