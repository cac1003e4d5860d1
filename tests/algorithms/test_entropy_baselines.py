"""Forking tokens (2506.01939) and the entropy advantage bonus (2506.14758)."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import (
    ESTIMATORS,
    EntropyBonusConfig,
    ForkingTokensConfig,
    entropy_advantage_bonus,
    entropy_bonus_advantages,
    forking_token_mask,
    forking_tokens_advantages,
    grpo_advantages,
)
from tests.support.algorithms_reference import (
    bonus_lists,
    forking_lists,
    grpo_lists,
    penalties,
    ragged_batch,
    scatter,
    tokens_of,
)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), percent=st.integers(1, 100))
def test_forking_tokens_are_the_most_uncertain_of_the_batch(seed, percent):
    entropy, mask, _, _ = ragged_batch(seed)
    kept = forking_token_mask(entropy, mask, percent / 100)
    values = sorted(entropy[mask].tolist(), reverse=True)
    threshold = values[math.ceil(percent * len(values) / 100) - 1]
    assert torch.equal(kept, mask & (entropy >= threshold))
    assert kept.dtype == torch.bool and not kept[~mask].any()


def test_bonus_equals_the_formula_and_keeps_the_sign():
    entropy, mask, _, _ = ragged_batch(0)
    advantages = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = entropy_advantage_bonus(advantages, entropy, mask, alpha=0.4, kappa=2.0)
    for i, j in mask.nonzero().tolist():
        a, h = advantages[i, j].item(), entropy[i, j].item()
        assert got[i, j].item() == pytest.approx(a + min(0.4 * h, abs(a) / 2), rel=1e-12)
    assert (got[~mask] == 0).all() and (got.sign() == advantages.sign() * mask).all()


def test_bonus_is_detached_from_the_entropy():
    entropy = torch.rand(2, 3, requires_grad=True)
    bonus = entropy_advantage_bonus(torch.randn(2, 3), entropy, torch.ones(2, 3, dtype=torch.bool), 0.4, 2.0)
    assert not bonus.requires_grad


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    percent=st.integers(1, 100),
    alpha=st.floats(0, 2),
    kappa=st.floats(1.1, 5),
    empty_row=st.booleans(),
    penalized=st.booleans(),
)
def test_both_credits_are_the_loops(seed, percent, alpha, kappa, empty_row, penalized):
    """On continuous rewards between 0 and 2, which GRPO does not split at a threshold."""
    entropy, mask, outcome, group_ids = ragged_batch(seed, empty_row=empty_row)
    outcome = outcome + torch.rand(len(outcome), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    penalty = penalties(len(outcome), seed) if penalized else None
    H = tokens_of(entropy, mask)
    grpo = grpo_lists(outcome, group_ids, [len(row) for row in H], penalty)
    batch = entropy, mask, outcome, group_ids
    for found, expected in (
        (grpo_advantages(*batch, penalty), grpo),
        (
            forking_tokens_advantages(*batch, ForkingTokensConfig(percent / 100), penalty),
            forking_lists(H, grpo, percent / 100),
        ),
        (
            entropy_bonus_advantages(*batch, EntropyBonusConfig(alpha, kappa), penalty),
            bonus_lists(H, grpo, alpha, kappa),
        ),
    ):
        torch.testing.assert_close(found, scatter(expected, mask), rtol=1e-6, atol=1e-9)


def test_grpo_is_openrlhfs_group_norm():
    """The formula of openrlhf 0.11.2, trainer/ppo_utils/experience_maker.py."""
    outcome = torch.rand(6, generator=torch.Generator().manual_seed(0)).repeat(2)
    mask = torch.ones(12, 4, dtype=torch.bool)
    by_group = outcome.view(3, 4)
    expected = (by_group - by_group.mean(-1, keepdim=True)) / (by_group.std(-1, keepdim=True) + 1e-9)
    found = grpo_advantages(torch.rand(12, 4), mask, outcome, torch.arange(12) // 4)
    torch.testing.assert_close(found, expected.view(-1, 1).expand(12, 4))


def test_all_tokens_forking_or_a_bonus_of_nothing_is_grpo():
    batch = ragged_batch(1)
    grpo = grpo_advantages(*batch)
    assert torch.equal(forking_tokens_advantages(*batch, ForkingTokensConfig(top_fraction=1.0)), grpo)
    assert torch.equal(entropy_bonus_advantages(*batch, EntropyBonusConfig(alpha=0.0)), grpo)


def test_what_either_adds_is_its_share():
    batch = ragged_batch(2)
    mask, grpo = batch[1], grpo_advantages(*batch)
    for name, expected in (
        ("forking_tokens", lambda advantages: (advantages != 0).double()),
        ("entropy_bonus", lambda advantages: advantages - grpo),
    ):
        estimator = ESTIMATORS[name]
        advantages = estimator.advantages(*batch, estimator.config())
        shares = estimator.shares(*batch, estimator.config())
        has_credit = grpo[mask] != 0
        torch.testing.assert_close(shares[has_credit], expected(advantages)[mask][has_credit])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_that_leaves_tokens_out_says_so(name):
    """A KL reward would give them a loss."""
    batch, estimator = ragged_batch(3), ESTIMATORS[name]
    advantages, mask = estimator.advantages(*batch, estimator.config()), batch[1]
    credited = (advantages != 0).any(dim=1)
    assert estimator.leaves_out == bool(((advantages == 0) & mask)[credited].any())


@pytest.mark.parametrize("value", [0.2, 0.3, 0.1 * 3, 1.0, 1e8, -1e8])
def test_equal_rewards_have_no_advantage(value):
    """Exactly 0, whatever a mean of equal numbers rounds to."""
    for size in (3, 6, 7, 8, 12):
        entropy, mask = torch.rand(2 * size, 5), torch.ones(2 * size, 5, dtype=torch.bool)
        penalty = torch.full((2 * size,), -0.1)
        for dtype, length_penalty in itertools.product([torch.float32, torch.float64], [None, penalty]):
            outcome = torch.full((2 * size,), value, dtype=dtype)
            batch = entropy, mask, outcome, torch.arange(2 * size) % 2
            assert (grpo_advantages(*batch, length_penalty) == 0).all()
            assert (entropy_bonus_advantages(*batch, EntropyBonusConfig(), length_penalty) == 0).all()
