"""The policy losses against loops, autograd, OpenRLHF's formulas and known cases."""

import itertools
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import ESTIMATORS, GRPOSConfig, grpo_s_advantages, policy_surrogate
from openrlhf_gtpo.algorithms.losses import sequence_ratio
from tests.support.algorithms_reference import loss as loss_by_loop
from tests.support.algorithms_reference import ragged_batch

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
LEVELS = [("token", "arithmetic"), ("sequence", "arithmetic"), ("sequence", "geometric")]
OPTIONS = [(level, mean, dual) for (level, mean), dual in itertools.product(LEVELS, [None, 1.5])]


class BatchLoss(NamedTuple):
    """The loss of one batch and its metrics, scalars."""

    loss: torch.Tensor
    clip_fraction: torch.Tensor
    approx_kl: torch.Tensor


def policy_loss(log_probs, old_log_probs, advantages, mask, **options):
    surrogate = policy_surrogate(log_probs, old_log_probs, advantages, mask, **options)
    units = surrogate.unit_mask.sum().clamp_min(1)
    clip_fraction = surrogate.clipped.to(surrogate.loss.dtype).sum() / units
    return BatchLoss(surrogate.loss.sum() / units, clip_fraction, surrogate.approx_kl.sum() / mask.sum().clamp_min(1))


def make_batch(seed, level, empty_row=False, spread=0.5):
    """log_probs, old_log_probs, advantages and mask, with junk outside the mask."""
    _, mask, _, _ = ragged_batch(seed, empty_row=empty_row)
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 3
    new = old + torch.randn(mask.shape, generator=generator, dtype=torch.float64) * spread
    shape = mask.shape if level == "token" else (mask.shape[0], 1)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64).expand(mask.shape)
    junk = float("nan")
    return *(x.masked_fill(~mask, junk) for x in (new, old, advantages)), mask


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    option=st.sampled_from(OPTIONS),
    low=st.floats(0, 0.9),
    high=st.floats(0, 2),
    empty_row=st.booleans(),
)
def test_loss_equals_the_loop(seed, option, low, high, empty_row):
    level, ratio_mean, dual_clip = option
    batch = make_batch(seed, level, empty_row)
    options = {"ratio_mean": ratio_mean, "dual_clip": dual_clip}
    got = policy_loss(*batch, level=level, clip_low=low, clip_high=high, **options)
    want = loss_by_loop(*batch, level, low, high, **options)
    for value, expected in zip(got, want):
        assert value.shape == ()
        assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("level, ratio_mean, dual_clip", OPTIONS)
def test_gradients(level, ratio_mean, dual_clip):
    new, old, advantages, mask = make_batch(1, level, empty_row=True)
    new = new.masked_fill(~mask, 0.0).requires_grad_()

    def scalar_loss(x):
        options = {"level": level, "ratio_mean": ratio_mean, "dual_clip": dual_clip}
        return policy_loss(x, old, advantages, mask, **options, **CLIP).loss

    assert torch.autograd.gradcheck(scalar_loss, (new,), eps=1e-7, atol=1e-6)
    (gradient,) = torch.autograd.grad(scalar_loss(new), new)
    assert (gradient[~mask] == 0).all() and (gradient[mask] != 0).any()


@pytest.mark.parametrize("level, ratio_mean", LEVELS)
def test_junk_outside_the_mask_does_not_reach_the_gradient(level, ratio_mean):
    new, old, advantages, mask = make_batch(0, level)
    new = new.masked_fill(~mask, float("inf")).requires_grad_()
    policy_loss(new, old, advantages, mask, level=level, ratio_mean=ratio_mean, **CLIP).loss.backward()
    assert torch.isfinite(new.grad).all() and (new.grad[~mask] == 0).all()


def test_clipped_tokens_have_no_gradient():
    new = torch.tensor([[0.5, -0.5, 0.5, -0.5]], requires_grad=True)
    advantages = torch.tensor([[1.0, 1.0, -1.0, -1.0]])
    mask = torch.ones(1, 4, dtype=torch.bool)
    out = policy_loss(new, torch.zeros(1, 4), advantages, mask, level="token", **CLIP)
    out.loss.backward()
    ratio = torch.tensor([0.5, -0.5, 0.5, -0.5]).exp()
    # Tokens 0 and 3 are the ones that their advantage pushes further out of the clip range.
    torch.testing.assert_close(new.grad[0], torch.tensor([0.0, -ratio[1], ratio[2], 0.0]) / 4)
    assert out.clip_fraction.item() == 0.5 and out.approx_kl.item() == 0.0


def openrlhf_ppo_terms(log_probs, old_log_probs, advantages, low, high, dual_clip):
    """OpenRLHF 0.11.2, PolicyLoss.forward with policy_loss_type="ppo"."""
    ratio = (log_probs - old_log_probs).clamp(min=-20.0, max=20.0).exp()
    surr1, surr2 = ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages
    clip1 = torch.min(surr1, surr2)
    if dual_clip is None:
        return -clip1, surr2 < surr1
    return -torch.where(advantages < 0, torch.max(clip1, dual_clip * advantages), clip1), surr2 < surr1


@pytest.mark.parametrize("dual_clip", [None, 1.3])
def test_token_level_is_openrlhfs_ppo_loss(dual_clip):
    new, old, advantages, mask = (x.float() if x.dtype == torch.float64 else x for x in make_batch(3, "token"))
    new, old, advantages = (x.masked_fill(~mask, 0.0) for x in (new, old, advantages))
    new[0, mask[0]] += 50.0
    terms, clipped = openrlhf_ppo_terms(new, old, advantages, 0.2, 0.28, dual_clip)
    surrogate = policy_surrogate(new, old, advantages, mask, level="token", dual_clip=dual_clip, **CLIP)
    assert torch.equal(surrogate.loss, terms * mask)
    assert torch.equal(surrogate.clipped, clipped & mask)
    assert torch.equal(surrogate.unit_mask, mask)


def test_geometric_ratio_is_gspos():
    new, old, advantages, mask = make_batch(4, "sequence")
    surrogate = policy_surrogate(new, old, advantages, mask, level="sequence", ratio_mean="geometric", **CLIP)
    expected = ((new - old).nan_to_num() * mask).sum(-1) / mask.sum(-1)
    torch.testing.assert_close(surrogate.ratio, expected.exp())


@pytest.mark.parametrize("ratio_mean", ["arithmetic", "geometric"])
def test_sequence_ratio_is_the_surrogates(ratio_mean):
    new, old, advantages, mask = make_batch(4, "sequence", empty_row=True)
    surrogate = policy_surrogate(new, old, advantages, mask, level="sequence", ratio_mean=ratio_mean, **CLIP)
    ratio = sequence_ratio(new, old, mask, ratio_mean)
    torch.testing.assert_close(ratio, surrogate.ratio)
    assert ratio[0] == 1  # no action tokens


def test_one_token_answers_make_token_and_sequence_agree():
    new, old, advantages, mask = make_batch(5, "sequence")
    first = mask & (mask.cumsum(-1) == 1)
    token = policy_loss(new, old, advantages, first, level="token", dual_clip=2.0, **CLIP)
    for ratio_mean in ("arithmetic", "geometric"):
        row = policy_loss(new, old, advantages, first, level="sequence", ratio_mean=ratio_mean, dual_clip=2.0, **CLIP)
        torch.testing.assert_close(row, token)


@pytest.mark.parametrize("level, ratio_mean", LEVELS)
def test_on_policy_loss_is_minus_the_mean_advantage(level, ratio_mean):
    _, old, advantages, mask = make_batch(6, level)
    out = policy_loss(old, old, advantages, mask, level=level, ratio_mean=ratio_mean, **CLIP)
    units = advantages[mask] if level == "token" else torch.stack([a[m][0] for a, m in zip(advantages, mask)])
    torch.testing.assert_close(out.loss, -units.mean())
    assert out.clip_fraction == 0 and out.approx_kl == 0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_surrogate_adds_up_over_micro_batches(level):
    new, old, advantages, mask = make_batch(7, level, empty_row=True)
    whole = policy_loss(new, old, advantages, mask, level=level, **CLIP).loss
    parts = [
        policy_surrogate(new[rows], old[rows], advantages[rows], mask[rows], level=level, **CLIP)
        for rows in (slice(0, 1), slice(1, 4), slice(4, None))
    ]
    total = sum(part.loss.sum() for part in parts) / sum(part.unit_mask.sum() for part in parts)
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("level, ratio_mean", LEVELS)
def test_nothing_to_learn_from_is_a_zero_with_a_gradient(level, ratio_mean):
    for columns in (0, 3):
        new = torch.zeros(2, columns, requires_grad=True)
        mask = torch.zeros(2, columns, dtype=torch.bool)
        out = policy_loss(new, new.detach(), new.detach(), mask, level=level, ratio_mean=ratio_mean, **CLIP)
        out.loss.backward()
        assert out.loss == 0 and out.clip_fraction == 0 and out.approx_kl == 0
        assert (new.grad == 0).all()


@pytest.mark.parametrize("level, ratio_mean", LEVELS)
@pytest.mark.parametrize("shift", [-500.0, 500.0])
def test_far_off_policy_stays_finite(level, ratio_mean, shift):
    new = torch.full((2, 3), shift, requires_grad=True)
    advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    mask = torch.ones(2, 3, dtype=torch.bool)
    out = policy_loss(new, torch.zeros(2, 3), advantages, mask, level=level, ratio_mean=ratio_mean, **CLIP)
    out.loss.backward()
    assert torch.isfinite(out.loss) and torch.isfinite(new.grad).all()


def test_bfloat16_is_computed_in_float32():
    new, old, advantages, mask = make_batch(8, "token")
    new, old = new.bfloat16().requires_grad_(), old.bfloat16()
    out = policy_loss(new, old, advantages.float(), mask, level="token", **CLIP)
    want = policy_loss(new.double(), old.double(), advantages.float(), mask, level="token", **CLIP)
    assert out.loss.dtype == torch.float32
    torch.testing.assert_close(out.loss.double(), want.loss, rtol=1e-5, atol=1e-6)
    out.loss.backward()
    assert new.grad.dtype == torch.bfloat16


def test_grpo_s_advantages_fit_the_sequence_loss():
    entropy, mask, outcome, group_ids = ragged_batch(1, dtype=torch.float32)
    advantages = grpo_s_advantages(entropy, mask, outcome, group_ids, GRPOSConfig())
    log_probs = torch.zeros_like(entropy)
    assert torch.isfinite(policy_loss(log_probs, log_probs, advantages, mask, level="sequence", **CLIP).loss)


def test_levels_are_never_mixed():
    new, old, advantages, mask = make_batch(10, "token")
    with pytest.raises(ValueError, match="row .* level='sequence' takes one advantage per row"):
        policy_loss(new, old, advantages, mask, level="sequence", **CLIP)
    assert {name: estimator.level for name, estimator in ESTIMATORS.items()} == {
        "gtpo": "token",
        "grpo_s": "sequence",
        "forking_tokens": "token",
        "entropy_bonus": "token",
    }
