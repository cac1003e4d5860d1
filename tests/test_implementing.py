"""The text of docs/implementing.md is what the package computes."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.algorithms import GRPOSConfig, GTPOConfig, grpo_s_advantages, gtpo_advantages, policy_surrogate
from tests.support import ROOT
from tests.support.algorithms_reference import ragged_batch

CODE = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "implementing.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The functions of the page's first program."""
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    return names


@pytest.mark.parametrize("seed", range(8))
def test_the_forty_lines_are_the_packages_advantages(page: dict[str, Any], seed: int) -> None:
    """On groups of 2 to 5 rows, some of them uniform, with holes in their masks, entropies of 0 and junk outside."""
    entropy, mask, outcome, group_ids = ragged_batch(seed, num_groups=6)
    inputs = (entropy, mask, outcome, group_ids)
    expected = {"gtpo": gtpo_advantages(*inputs, GTPOConfig()), "grpo_s": grpo_s_advantages(*inputs, GRPOSConfig())}
    for group in group_ids.unique():
        rows = group_ids == group
        arrays = [values[rows].numpy() for values in (entropy, mask, outcome)]
        for name, wanted in expected.items():
            np.testing.assert_allclose(page[name](*arrays), wanted[rows].numpy(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("by_response", [False, True])
def test_the_objective_is_the_packages(page: dict[str, Any], by_response: bool) -> None:
    torch.manual_seed(1)
    _, mask, outcome, group_ids = ragged_batch(3)
    advantages = grpo_s_advantages(torch.rand(mask.shape).double(), mask, outcome, group_ids, GRPOSConfig())
    log_probs, old = (torch.randn(mask.shape, dtype=torch.float64) - 3 for _ in range(2))
    surrogate = policy_surrogate(log_probs, old, advantages, mask, level="sequence" if by_response else "token")
    assert surrogate.clipped.any()
    wanted = -surrogate.loss.sum() / surrogate.unit_mask.sum()
    arrays = (values.numpy() for values in (log_probs, old, advantages, mask))
    assert page["objective"](*arrays, by_response=by_response) == pytest.approx(wanted.item(), abs=1e-9)


def test_it_is_forty_lines_and_the_other_program_of_the_page_runs() -> None:
    assert len([line for line in CODE[0].splitlines() if line.strip()]) <= 40
    names: dict[str, Any] = {}
    exec(CODE[1], names)
    assert names["advantages"].isfinite().all() and names["advantages"].abs().max() > 0.1
