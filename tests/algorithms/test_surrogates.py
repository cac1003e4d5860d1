"""The surrogates against loops with hand-written derivatives, identities, and degenerate cases."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import SURROGATES, policy_surrogate
from openrlhf_gtpo.algorithms.surrogates import (
    CISPOConfig,
    ClipCovConfig,
    GMPOConfig,
    GSPOTokenConfig,
    HAPOConfig,
    HTPOConfig,
    KLCovConfig,
    SAPOConfig,
    STAREConfig,
    cispo_surrogate,
    clip_cov_surrogate,
    gmpo_surrogate,
    gspo_token_surrogate,
    hapo_surrogate,
    htpo_surrogate,
    kl_cov_surrogate,
    stare_surrogate,
    token_covariance,
)
from tests.support.algorithms_reference import ragged_batch, scatter, surrogate_pairs, tokens_of

# Settings under which part of a small batch is clipped, drawn or marked, and part is not.
CONFIGS = {
    "gspo_token": [GSPOTokenConfig(0.05, 0.1), GSPOTokenConfig(0.05, 0.1, dual_clip=1.05)],
    "cispo": [CISPOConfig(), CISPOConfig(clip_low=0.3, clip_high=0.2)],
    "sapo": [SAPOConfig(), SAPOConfig(tau_positive=0.3, tau_negative=4.0)],
    "gmpo": [GMPOConfig(), GMPOConfig(clip_low=0.1, clip_high=0.2), GMPOConfig(clip_low=1.0)],
    "clip_cov": [ClipCovConfig(fraction=1.0, cov_low=0.0), ClipCovConfig(fraction=1.0, cov_low=0.1, dual_clip=1.1)],
    "kl_cov": [KLCovConfig(), KLCovConfig(fraction=0.2, coef=0.5)],
    "stare": [
        STAREConfig(),
        STAREConfig(target_entropy=10.0),
        STAREConfig(0.1, 0.1, 1.2, fraction=0.3, weight_positive=2.0, weight_negative=0.5, target_entropy=1.6),
    ],
    "hapo": [HAPOConfig(), HAPOConfig(0.1, 0.3, 1.2, pivot=0.4, redistribution=0.5, adaptation=2.0)],
    "htpo": [HTPOConfig(), HTPOConfig(0.1, 0.2, 1.1, forking_fraction=0.6, lowest_fraction=0.9, highest_fraction=0.7)],
}
CASES = [(name, config) for name, configs in CONFIGS.items() for config in configs]


def make_batch(seed, level, empty_row=False, spread=0.5, dtype=torch.float64):
    """log_probs, old_log_probs, advantages, mask; junk outside it except in log_probs, whose gradient is taken."""
    _, mask, _, _ = ragged_batch(seed, empty_row=empty_row)
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(mask.shape, generator=generator, dtype=torch.float64) * 3
    new = old + torch.randn(mask.shape, generator=generator, dtype=torch.float64) * spread
    shape = mask.shape if level == "token" else (mask.shape[0], 1)
    advantages = torch.randn(shape, generator=generator, dtype=torch.float64).expand(mask.shape)
    old, advantages = (x.masked_fill(~mask, float("nan")).to(dtype) for x in (old, advantages))
    return new.masked_fill(~mask, 0).to(dtype).requires_grad_(), old, advantages, mask


def context(name, batch):
    """What the surrogate reads besides: entropies with ties, rows of both outcomes, easy and hard prompts."""
    entropy, _, correct, _ = ragged_batch(7, num_columns=batch[3].shape[1])
    entropy, correct = (values.repeat(3, *[1] * (values.dim() - 1))[: len(batch[3])] for values in (entropy, correct))
    entropy = entropy.nan_to_num(1.0).masked_fill(~batch[3], float("nan"))
    known = {"entropy": entropy, "correct": correct, "accuracy": torch.linspace(0, 1, len(correct)).roll(2)}
    return {name: known[name] for name in SURROGATES[name].reads}


def run(name, batch, config, **given):
    surrogate = SURROGATES[name].loss(*batch, config, **(context(name, batch) | given))
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), batch[0])
    return surrogate, gradient


def test_there_is_a_case_for_every_surrogate():
    assert CONFIGS.keys() == SURROGATES.keys()
    assert all(isinstance(config, SURROGATES[name].config) for name, config in CASES)


@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 10_000), case=st.sampled_from(CASES), of_rows=st.booleans(), empty_row=st.booleans())
def test_values_and_gradients_are_the_loops(seed, case, of_rows, empty_row):
    name, config = case
    batch = make_batch(seed, "sequence" if of_rows else SURROGATES[name].level, empty_row)
    new, old, advantages, mask = batch
    surrogate, gradient = run(name, batch, config)
    read = {key: tokens_of(x, mask) if x.dim() > 1 else x.tolist() for key, x in context(name, batch).items()}
    pairs = surrogate_pairs(name, *(tokens_of(x.detach(), mask) for x in (new, old, advantages)), config, **read)
    losses, slopes = (scatter([[pair[k] for pair in row] for row in pairs], mask) for k in (0, 1))
    of_unit = surrogate.loss if SURROGATES[name].level == "token" else surrogate.loss[:, None]
    expected = losses if SURROGATES[name].level == "token" else losses.sum(-1, keepdim=True)
    torch.testing.assert_close(of_unit, expected, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-9)
    units = mask if SURROGATES[name].level == "token" else mask.any(-1)
    assert torch.equal(surrogate.unit_mask, units) and not surrogate.clipped[~units].any()
    torch.testing.assert_close(surrogate.approx_kl, (old - new.detach()).where(mask, 0))
    assert (surrogate.ratio[~units] == 1).all() and not surrogate.ratio.requires_grad


@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_the_cases_clip_something_and_not_everything(name, config):
    clipped = torch.cat(
        [run(name, make_batch(seed, SURROGATES[name].level), config)[0].clipped.flatten() for seed in range(20)]
    )
    assert clipped.any() == (name != "sapo" and config not in (CISPOConfig(),)) and not clipped.all()


@pytest.mark.parametrize("name", SURROGATES)
def test_on_policy_each_is_reinforce(name):
    """Before the policy moves, the gradient is minus the advantage, divided by the row's tokens at sequence level."""
    new, _, advantages, mask = make_batch(3, "sequence")
    plain = {"clip_cov": {"cov_low": 1e6, "cov_high": 1e7}, "hapo": {"redistribution": 0.0}}  # changes no gradient
    hard = {"accuracy": torch.zeros(len(mask))} if name == "htpo" else {}
    config = SURROGATES[name].config(**plain.get(name, {}))
    _, gradient = run(name, (new, new.detach(), advantages, mask), config, **hard)
    expected = -advantages.where(mask, 0)
    if SURROGATES[name].level == "sequence":
        expected = expected / mask.sum(-1, keepdim=True)
    torch.testing.assert_close(gradient, expected)


def test_gspo_token_is_gspo_where_a_row_has_one_advantage():
    batch = make_batch(4, "sequence", empty_row=True)
    config = GSPOTokenConfig(0.05, 0.1)
    surrogate = gspo_token_surrogate(*batch, config)
    mask = batch[3]
    of_rows = surrogate.loss.sum(-1) / mask.sum(-1).clamp_min(1)
    gspo = policy_surrogate(*batch, level="sequence", ratio_mean="geometric", clip_low=0.05, clip_high=0.1)
    torch.testing.assert_close(of_rows, gspo.loss)
    gradients = [torch.autograd.grad(loss.sum(), batch[0])[0] for loss in (of_rows, gspo.loss)]
    torch.testing.assert_close(*gradients)


def test_with_one_token_a_row_gspo_token_and_gmpo_are_ppo():
    new, old, advantages, _ = make_batch(5, "token")
    column = torch.ones(len(new), 1, dtype=torch.bool)
    batch = [values[:, :1].nan_to_num(0.3) for values in (new.detach(), old, advantages)]
    range_ = {"clip_low": 0.2, "clip_high": 0.28}
    ppo = policy_surrogate(*batch, column, level="token", **range_)
    assert ppo.clipped.any()
    torch.testing.assert_close(gspo_token_surrogate(*batch, column, GSPOTokenConfig(**range_)).loss, ppo.loss)
    torch.testing.assert_close(gmpo_surrogate(*batch, column, GMPOConfig(**range_)).loss[:, None], ppo.loss)


def test_cispo_keeps_the_gradient_that_ppo_drops():
    new = torch.tensor([[2.0, 0.1]], requires_grad=True)
    ones = torch.ones(1, 2)
    surrogate = cispo_surrogate(new, torch.zeros(1, 2), ones, ones.bool(), CISPOConfig())
    (gradient,) = torch.autograd.grad(surrogate.loss.sum(), new)
    torch.testing.assert_close(gradient, -torch.tensor([[5.0, math.exp(0.1)]]))
    assert surrogate.clipped.tolist() == [[True, False]]


def test_without_its_penalty_kl_cov_is_the_unclipped_policy_gradient():
    batch = make_batch(6, "token")
    unclipped = policy_surrogate(*batch, level="token", clip_low=1.0, clip_high=1e6)
    torch.testing.assert_close(kl_cov_surrogate(*batch, KLCovConfig(fraction=1.0, coef=0.0)).loss, unclipped.loss)


def test_without_candidates_clip_cov_is_ppo():
    batch = make_batch(6, "token")
    config = ClipCovConfig(cov_low=1e6, cov_high=1e7)
    expected = policy_surrogate(*batch, level="token", clip_low=config.clip_low, clip_high=config.clip_high)
    found = clip_cov_surrogate(*batch, config)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.clipped, expected.clipped)


def test_clip_cov_draws_as_many_as_it_should_from_the_candidates():
    new, old, advantages, mask = make_batch(7, "token")
    everything = ClipCovConfig(clip_low=1.0, clip_high=1e6, fraction=1.0, cov_low=0.0)
    candidates = clip_cov_surrogate(new, old, advantages, mask, everything).clipped
    few = dataclasses.replace(everything, fraction=2.5 / int(mask.sum()))
    drawn = clip_cov_surrogate(new, old, advantages, mask, few).clipped
    assert drawn.sum() == 2 < candidates.sum() and not (drawn & ~candidates).any()
    least = dataclasses.replace(everything, fraction=1e-9)
    assert clip_cov_surrogate(new, old, advantages, mask, least).clipped.sum() == 1


def test_at_its_target_entropy_or_without_weights_stare_is_ppo():
    batch = make_batch(6, "token")
    expected = policy_surrogate(*batch, level="token").loss
    assert torch.equal(stare_surrogate(*batch, STAREConfig(target_entropy=0.0)).loss, expected)
    assert torch.equal(stare_surrogate(*batch, STAREConfig(weight_positive=1.0, target_entropy=9.0)).loss, expected)
    assert not torch.equal(stare_surrogate(*batch, STAREConfig(target_entropy=9.0)).loss, expected)


def test_without_redistribution_and_adaptation_hapo_is_ppo():
    batch = make_batch(6, "token")
    expected = policy_surrogate(*batch, level="token")
    found = hapo_surrogate(*batch, HAPOConfig(redistribution=0.0, adaptation=0.0), **context("hapo", batch))
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.clipped, expected.clipped)


def test_htpo_has_ppos_loss_in_wrong_responses_and_a_gradient_where_ppo_has_none():
    """That of the advantage: the policy goes on away from forking tokens of wrong responses."""
    new, old, advantages, mask = make_batch(6, "token")
    batch, wrong = (new, old, -advantages.abs(), mask), torch.zeros(len(mask))
    given = context("htpo", batch) | {"correct": wrong}
    found = htpo_surrogate(*batch, HTPOConfig(), **given)
    expected = policy_surrogate(*batch, level="token")
    torch.testing.assert_close(found.loss, expected.loss)
    ours, theirs = (torch.autograd.grad(one.loss.sum(), new)[0] for one in (found, expected))
    more = expected.clipped & ~found.clipped
    assert more.any() and (theirs[more] == 0).all() and (ours[more] > 0).all()
    torch.testing.assert_close(ours[~more], theirs[~more])


@pytest.mark.parametrize("name", SURROGATES)
def test_nothing_and_the_far_off_policy_stay_finite(name):
    new, old, advantages, mask = make_batch(8, "sequence", dtype=torch.float32)
    config = SURROGATES[name].config()
    empty = torch.zeros_like(mask)
    surrogate, gradient = run(name, (new, old, advantages, empty), config)
    assert (surrogate.loss == 0).all() and (gradient == 0).all() and not surrogate.unit_mask.any()
    new.data[0] += 500
    new.data[1] -= 500
    surrogate, gradient = run(name, (new, old, advantages, mask), config)
    assert surrogate.loss.isfinite().all() and gradient.isfinite().all()
    assert surrogate.loss.dtype == torch.float32


@pytest.mark.parametrize("value", [0.2, 0.3, 1e8])
def test_equal_advantages_have_no_covariance(value):
    """Exactly 0, so that no token is clipped for the rounding of a mean."""
    log_probs = -torch.rand(5, 7, generator=torch.Generator().manual_seed(0))
    for count in (3, 6, 7, 12, 35):
        mask = torch.arange(35).view(5, 7) < count
        assert (token_covariance(log_probs, torch.full((5, 7), value), mask)[mask] == 0).all()
