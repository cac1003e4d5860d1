"""A caller's mistake raises a ValueError with one sentence that says which value is wrong and why."""

import pytest
import torch

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy

HIDDEN, WEIGHT, LABELS = torch.zeros(3, 4), torch.zeros(10, 4), torch.zeros(3, dtype=torch.long)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, r"\(3, 5\) and \(10, 4\)"),
        ({"hidden": torch.zeros(1, 3, 4)}, r"hidden must be \(T, H\)"),
        ({"labels": torch.zeros(4, dtype=torch.long)}, r"labels must be \(3,\)"),
        ({"labels": torch.zeros(3)}, "labels must be integers"),
        ({"labels": torch.tensor([0, 10, 1])}, r"token id 10, outside the vocabulary \[0, 10\)"),
        ({"labels": torch.tensor([0, -100, 1])}, "token id -100"),
        ({"labels": torch.tensor([0, 9, 1]), "vocab_size": 9}, r"token id 9, outside the vocabulary \[0, 9\)"),
        ({"vocab_size": 11}, "vocab_size is 11 but weight has only 10"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"bias": torch.zeros(9)}, r"bias must be \(10,\)"),
        ({"weight": torch.zeros(10, 4, dtype=torch.bfloat16)}, "share one float dtype"),
        ({"weight": torch.zeros(10, 4, device="meta")}, "on the device of hidden, cpu"),
        ({"temperature": 0.0}, "temperature must be positive and finite, but it is 0.0"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"chunk_bytes": 10}, "chunk_bytes"),
    ],
)
def test_a_mistake_is_a_value_error(changed, message):
    arguments = {"hidden": HIDDEN, "weight": WEIGHT, "labels": LABELS} | changed
    tensors = [arguments.pop(name) for name in ("hidden", "weight", "labels")]
    with pytest.raises(ValueError, match=message):
        linear_log_prob_and_entropy(*tensors, **arguments)


def test_labels_may_be_any_integers():
    expected = linear_log_prob_and_entropy(HIDDEN, WEIGHT, LABELS)
    for dtype in (torch.int32, torch.int16, torch.uint8):
        torch.testing.assert_close(linear_log_prob_and_entropy(HIDDEN, WEIGHT, LABELS.to(dtype)), expected)
