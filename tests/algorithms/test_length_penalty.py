"""R(i): of section 4.5.1 in both forms, and within groups."""

import pytest
import torch

from openrlhf_gtpo.algorithms import group_relative_penalty, length_penalty, length_rescaling
from tests.support.algorithms_reference import grop_list, rescaling_list


def by_definition(length, soft, hard, form):
    if length <= soft:
        return 0.0
    if length > hard:
        return -1.0
    return (soft - length) / (hard if form == "as_printed" else hard - soft)


@pytest.mark.parametrize("form", ["continuous", "as_printed"])
@pytest.mark.parametrize("soft, hard", [(6, 10), (0, 4), (9, 10)])
def test_every_length(form, soft, hard):
    lengths = torch.arange(0, 14)
    got = length_penalty(lengths, soft, hard, form)
    assert got.dtype == torch.float32 and got.min() >= -1 and got.max() <= 0
    torch.testing.assert_close(got, torch.tensor([by_definition(n, soft, hard, form) for n in range(14)]))


def test_the_forms_differ_by_a_jump_at_the_hard_limit():
    lengths = torch.tensor([10, 11])
    assert length_penalty(lengths, 6, 10).tolist() == [-1.0, -1.0]
    torch.testing.assert_close(length_penalty(lengths, 6, 10, "as_printed"), torch.tensor([-0.4, -1.0]))


@pytest.mark.parametrize("size", [1, 2, 4, 7, 8])
def test_group_relative_penalty_is_the_loops(size):
    """With every number of right responses, groups shuffled, lengths that tie, and rows without tokens."""
    g = torch.Generator().manual_seed(size)
    won = torch.cat([torch.arange(size) < right for right in range(size + 1)])
    group_ids = torch.arange(size + 1).repeat_interleave(size) * 7 - 11
    for _ in range(20):
        order = torch.randperm(len(won), generator=g)
        lengths = torch.randint(0, 12, (len(won),), generator=g)
        got = group_relative_penalty(lengths, won[order], group_ids[order])
        assert got.dtype == torch.float32 and -0.5 <= got.min() and got.max() <= 0
        expected = torch.tensor(grop_list(lengths, won[order], group_ids[order]))
        torch.testing.assert_close(got, expected.float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("right", "lengths", "expected"),
    [
        ("1110", [2, 4, 12, 40], [0.0, 0.0, -0.5 * 5 / 7, 0.0]),  # easy: the right ones, the knee (2 + 12) / 2
        ("1000", [40, 1, 1, 1], [0.0, 0.0, 0.0, 0.0]),  # hard: none
        ("11100", [1, 1, 9, 9, 30], [0.0, 0.0, 0.0, 0.0, 0.0]),  # the right ones, the knee 15.5 of all
        ("11100", [31, 1, 1, 1, 1], [-0.5 * 15 / 16, 0.0, 0.0, 0.0, 0.0]),
        ("1100", [40, 1, 1, 40], [0.0, 0.0, 0.0, -0.5 * (40 - 20.5) / 20.5]),  # a draw: the wrong ones
        ("1111", [1, 2, 2, 100], [0.0, 0.0, 0.0, -0.5 * (100 - 50.5) / 50.5]),
        ("1111", [3, 3, 3, 3], [0.0, 0.0, 0.0, 0.0]),  # at the knee
        ("11110", [1, 1, 1, 0, 9], [-0.5 * 0.25 / 0.75] * 3 + [0.0, 0.0]),  # the mean, 0.75, is above the middle
    ],
)
def test_group_relative_penalty_by_hand(right, lengths, expected):
    won = torch.tensor([letter == "1" for letter in right])
    got = group_relative_penalty(torch.tensor(lengths), won, torch.zeros(len(won), dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor(expected))


def test_group_relative_penalty_goes_to_the_longest_and_stays_above_a_half():
    """L is at least (min + max) / 2, so no response with tokens beside it in its group is longer than 2 L."""
    won, group_ids = torch.ones(8, dtype=torch.bool), torch.zeros(8, dtype=torch.long)
    for longest in (10, 20, 1000):
        penalty = group_relative_penalty(torch.tensor([10] * 7 + [longest]), won, group_ids)
        assert not penalty[:7].any() and bool(penalty[7] < 0) == (longest > 10) and penalty[7] > -0.5


@pytest.mark.parametrize("alpha", [0.0, 0.33, 2.0])
def test_rescaling_is_the_loops(alpha):
    g = torch.Generator().manual_seed(5)
    lengths, outcome = torch.randint(0, 9, (60,), generator=g), torch.rand(60, generator=g) * 2
    group_ids = torch.randint(0, 12, (60,), generator=g) - 3
    lengths[group_ids == 0] = 0
    got = length_rescaling(lengths, outcome, group_ids, alpha)
    expected = torch.tensor(rescaling_list(lengths, outcome, group_ids, alpha)).float()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)
    assert bool(got.any()) == (alpha > 0)


def test_rescaling_asks_the_outcome_first():
    """A right response of any length stays above a wrong one, whose reward is 0 and stays it; of mean length it has
    1 / (1 + alpha). A reward below 0 would rise with its length."""
    lengths, outcome, group_ids = torch.tensor([1, 3, 8]), torch.tensor([1.0, 0.0, 1.0]), torch.zeros(3).long()
    rescaled = outcome + length_rescaling(lengths, outcome, group_ids, alpha=1.0)
    torch.testing.assert_close(rescaled, torch.tensor([1 / (1 + 1 / 4), 0.0, 1 / (1 + 2)]))
    with pytest.raises(ValueError, match="outcome of row 1 is -1; rewards that are rescaled must be >= 0"):
        length_rescaling(lengths, torch.tensor([1.0, -1.0, 1.0]), group_ids)
