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


def test_defaults():
    config = GTPOConfig()
    assert (config.variant, config.alpha1, config.alpha2, config.success_threshold) == ("v3", 1.0, 0.1, 1.0)
    assert (config.compare, config.entropy_mean) == ("position", "arithmetic")
    assert (config.normalise_over, config.scope) == ("zero_filled", "group")
    assert (config.shape_uniform_groups, config.entropy_eps) == (False, 1e-6)
    assert (GRPOSConfig().variant, GRPOSConfig().beta1, GRPOSConfig().beta2) == ("v3", 1.0, 0.1)


def test_alphas_that_sum_to_one_follow_from_each_other():
    for variant in ("v1_clipped", "v2"):
        assert (GTPOConfig(variant=variant).alpha1, GTPOConfig(variant=variant).alpha2) == (0.9, 0.1)
        assert GTPOConfig(variant=variant, alpha1=0.8).alpha2 == pytest.approx(0.2)
        assert GTPOConfig(variant=variant, alpha2=0.3).alpha1 == pytest.approx(0.7)
        assert GTPOConfig(variant=variant, alpha1=0.7, alpha2=0.3, kappa=2).alpha1 == 0.7


def test_configs_are_frozen():
    for config in (GTPOConfig(), GRPOSConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.scope = "batch"
        with pytest.raises(ValueError, match="scope='rank'"):
            dataclasses.replace(config, scope="rank")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"variant": "v4"}, "variant='v4' is not a known option; use one of 'v1', 'v1_clipped', 'v2', 'v3'."),
        ({"compare": "token"}, "compare='token'"),
        ({"entropy_mean": "harmonic"}, "entropy_mean='harmonic'"),
        ({"normalise_over": "all"}, "normalise_over='all'"),
        ({"scope": "rank"}, "scope='rank'"),
        ({"shape_uniform_groups": 1}, "shape_uniform_groups=1"),
        ({"entropy_eps": 0.0}, "entropy_eps=0.0 is out of range; use a finite number > 0."),
        ({"entropy_eps": float("inf")}, "entropy_eps=inf"),
        ({"success_threshold": float("nan")}, "success_threshold=nan is out of range; use a finite number."),
        ({"alpha": -0.1}, "alpha=-0.1 is out of range; use a finite number >= 0."),
        ({"alpha": "0.1"}, "alpha='0.1'"),
        ({"alpha1": float("nan")}, "alpha1=nan"),
        ({"alpha2": -1}, "alpha2=-1"),
        ({"kappa": 1.0}, "kappa=1.0 is out of range; use a finite number > 1."),
        ({"variant": "v2", "kappa": 0.5}, "kappa=0.5"),
        ({"variant": "v2", "alpha1": 0.5, "alpha2": 0.4}, "alpha1=0.5, alpha2=0.4 sum to 0.9"),
        ({"variant": "v1_clipped", "alpha1": 1.0, "alpha2": 0.1}, "alpha1 + alpha2 = 1"),
        ({"variant": "v1_clipped", "alpha2": 1.5}, "alpha2=1.5 is out of range; use a finite number >= 0 and <= 1."),
        (
            {"variant": "v2", "alpha1": 0.6, "alpha2": 0.4, "kappa": 2.0},
            "alpha1=0.6, kappa=2 give alpha1 + alpha1/kappa = 0.9 < 1",
        ),
    ],
)
def test_gtpo_configs_refused(fields, message):
    with pytest.raises(ValueError) as error:
        GTPOConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"variant": "v1_clipped"}, "variant='v1_clipped'"),
        ({"beta": -1.0}, "beta=-1.0"),
        ({"beta1": float("inf")}, "beta1=inf"),
        ({"beta2": None}, "beta2=None"),
        ({"ratio_mean": "median"}, "ratio_mean='median'"),
        ({"entropy_mean": ["arithmetic"]}, "entropy_mean=['arithmetic']"),
        ({"entropy_eps": -1e-6}, "entropy_eps=-1e-06"),
    ],
)
def test_grpo_s_configs_refused(fields, message):
    with pytest.raises(ValueError) as error:
        GRPOSConfig(**fields)
    assert message in str(error.value)


@pytest.mark.parametrize("function, config", CALLS)
def test_entropies_that_are_not_finite_name_the_row(function, config):
    for value in (float("nan"), float("inf"), float("-inf")):
        entropy, mask, outcome, group_ids = ragged_batch(0)
        column = int(mask[4].nonzero()[-1])
        entropy[4, column] = value
        with pytest.raises(ValueError, match=f"^entropy of row 4 is {value} at column {column}"):
            function(entropy, mask, outcome, group_ids, config)


@pytest.mark.parametrize("function, config", CALLS)
def test_inputs_that_do_not_fit(function, config):
    entropy, mask, outcome, group_ids = ragged_batch(0)
    nan = outcome.clone()
    nan[3] = float("nan")
    for batch, message in (
        ((entropy[0], mask, outcome, group_ids), r"entropy has shape \(7,\)"),
        ((entropy, mask[:, 1:], outcome, group_ids), "entropy has shape"),
        ((entropy, mask.float(), outcome, group_ids), "dtype torch.float32, but it must be .* bool"),
        ((entropy, mask, outcome[1:], group_ids), "outcome has shape"),
        ((entropy, mask, nan, group_ids), "outcome of row 3 is nan"),
        ((entropy, mask, outcome, group_ids[:, None]), "group_ids has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*batch, config)


@pytest.mark.parametrize("function, config", ADVANTAGES)
def test_a_group_of_one_row_needs_the_batch_scope(function, config):
    entropy, mask, outcome, group_ids = ragged_batch(0)
    group_ids[2] = 999
    with pytest.raises(ValueError, match="group 999 has only row 2, .* use scope='batch'"):
        function(entropy, mask, outcome, group_ids, config)
    batch_scope = dataclasses.replace(config, scope="batch")
    assert torch.isfinite(function(entropy, mask, outcome, group_ids, batch_scope)).all()


@pytest.mark.parametrize("function, config", ADVANTAGES)
def test_length_penalties_that_do_not_fit(function, config):
    batch = ragged_batch(0)
    penalty = torch.zeros(len(batch[2]))
    with pytest.raises(ValueError, match="length_penalty has shape"):
        function(*batch, config, length_penalty=penalty[1:])
    penalty[1] = float("-inf")
    with pytest.raises(ValueError, match="length_penalty of row 1 is -inf"):
        function(*batch, config, length_penalty=penalty)


@pytest.mark.parametrize("function, config", CALLS)
def test_inputs_are_left_as_they_were(function, config):
    batch = ragged_batch(0)
    before = [x.clone() for x in batch]
    function(*batch, config)
    for now, then in zip(batch, before):
        assert torch.equal(now.nan_to_num(7.5), then.nan_to_num(7.5))
