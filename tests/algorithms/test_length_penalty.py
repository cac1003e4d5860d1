"""R(i) of section 4.5.1 in both forms."""

import pytest
import torch

from openrlhf_gtpo.algorithms import length_penalty


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


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([3], 10, 10), "soft_limit=10, hard_limit=10"),
        (([3], 11, 10), "use 0 <= soft_limit < hard_limit"),
        (([3], -1, 10), "soft_limit=-1"),
    ],
)
def test_refusals(arguments, message):
    lengths, *rest = arguments
    with pytest.raises(ValueError, match=message):
        length_penalty(torch.tensor(lengths), *rest)
