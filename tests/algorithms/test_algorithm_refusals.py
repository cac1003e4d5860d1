"""Unusable configs and batches are refused with a message that says which field, which value and why."""

import dataclasses

import pytest
import torch

from openrlhf_gtpo.algorithms import (
    GRPOSConfig,
    GTPOConfig,
    grpo_s_advantages,
    grpo_s_parts,
    gtpo_advantages,
    gtpo_parts,
    gtpo_shares,
)
from tests.support.algorithms_reference import ragged_batch

CALLS = [
    (gtpo_parts, GTPOConfig()),
    (gtpo_advantages, GTPOConfig()),
    (gtpo_advantages, GTPOConfig(compare="group", scope="batch")),
    (gtpo_shares, GTPOConfig(compare="response")),
    (grpo_s_parts, GRPOSConfig()),
    (grpo_s_advantages, GRPOSConfig()),
]
ADVANTAGES = [(gtpo_advantages, GTPOConfig()), (grpo_s_advantages, GRPOSConfig())]


def test_alphas_that_sum_to_one_follow_from_each_other():
    for variant in ("v1_clipped", "v2"):
        assert (GTPOConfig(variant=variant).alpha1, GTPOConfig(variant=variant).alpha2) == (0.9, 0.1)
        assert GTPOConfig(variant=variant, alpha1=0.8).alpha2 == pytest.approx(0.2)
        assert GTPOConfig(variant=variant, alpha2=0.3).alpha1 == pytest.approx(0.7)
        assert GTPOConfig(variant=variant, alpha1=0.7, alpha2=0.3, kappa=2).alpha1 == 0.7


@pytest.mark.parametrize("function, config", CALLS)
def test_entropies_that_are_not_finite_name_the_row(function, config):
    for value in (float("nan"), float("inf"), float("-inf")):
        entropy, mask, outcome, group_ids = ragged_batch(0)
        column = int(mask[4].nonzero()[-1])
        entropy[4, column] = value
        with pytest.raises(ValueError, match=f"^entropy of row 4 is {value} at column {column}"):
            function(entropy, mask, outcome, group_ids, config)


@pytest.mark.parametrize("function, config", ADVANTAGES)
def test_a_group_of_one_row_needs_the_batch_scope(function, config):
    entropy, mask, outcome, group_ids = ragged_batch(0)
    group_ids[2] = 999
    with pytest.raises(ValueError, match="group 999 has only row 2, .* use scope='batch'"):
        function(entropy, mask, outcome, group_ids, config)
    batch_scope = dataclasses.replace(config, scope="batch")
    assert torch.isfinite(function(entropy, mask, outcome, group_ids, batch_scope)).all()


@pytest.mark.parametrize("function, config", CALLS)
def test_inputs_are_left_as_they_were(function, config):
    batch = ragged_batch(0)
    before = [x.clone() for x in batch]
    function(*batch, config)
    for now, then in zip(batch, before):
        assert torch.equal(now.nan_to_num(7.5), then.nan_to_num(7.5))
