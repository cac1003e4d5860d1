"""Forking tokens (2506.01939) and the entropy advantage bonus (2506.14758)."""

import math

import pytest
import torch
from algorithms_reference import ragged_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import entropy_advantage_bonus, forking_token_mask


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10_000), percent=st.integers(1, 100))
def test_forking_tokens_are_the_most_uncertain_of_the_batch(seed, percent):
    entropy, mask, _, _ = ragged_batch(seed)
    kept = forking_token_mask(entropy, mask, percent / 100)
    values = sorted(entropy[mask].tolist(), reverse=True)
    threshold = values[math.ceil(percent * len(values) / 100) - 1]
    assert torch.equal(kept, mask & (entropy >= threshold))
    assert kept.dtype == torch.bool and not kept[~mask].any()


def test_forking_tokens_keeps_a_fifth_by_default():
    entropy = torch.randperm(100).float().reshape(5, 20)
    kept = forking_token_mask(entropy, torch.ones(5, 20, dtype=torch.bool))
    assert torch.equal(kept, entropy >= 80)
    # 0.1 * 30 is 3 whatever binary fractions make of it
    assert forking_token_mask(entropy[:2, :15], torch.ones(2, 15, dtype=torch.bool), 0.1).sum() == 3


def test_forking_tokens_of_nothing():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    assert torch.equal(forking_token_mask(torch.full((2, 3), float("nan")), mask), mask)


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


def test_refusals():
    entropy, mask, _, _ = ragged_batch(0)
    for fraction in (0.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="top_fraction="):
            forking_token_mask(entropy, mask, fraction)
    with pytest.raises(ValueError, match="mask has dtype"):
        forking_token_mask(entropy, mask.int())
    advantages = torch.ones_like(entropy)
    with pytest.raises(ValueError, match="kappa=1.0"):
        entropy_advantage_bonus(advantages, entropy, mask, 0.4, 1.0)
    with pytest.raises(ValueError, match="alpha=-1"):
        entropy_advantage_bonus(advantages, entropy, mask, -1, 2.0)
    with pytest.raises(ValueError, match="mask has shape"):
        entropy_advantage_bonus(advantages, entropy[:, 1:], mask, 0.4, 2.0)
    entropy[1, int(mask[1].nonzero()[0])] = float("inf")
    with pytest.raises(ValueError, match="entropy of row 1 is inf"):
        entropy_advantage_bonus(advantages, entropy, mask, 0.4, 2.0)
    with pytest.raises(ValueError, match="entropy of row 1 is inf"):
        forking_token_mask(entropy, mask)
