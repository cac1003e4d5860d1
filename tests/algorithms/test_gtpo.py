"""GTPO rewards and advantages against loops, identities from the paper and known cases."""

import itertools
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages, gtpo_parts, gtpo_shares, success
from tests.support.algorithms_reference import (
    advantage_lists,
    gtpo_reward_lists,
    penalties,
    ragged_batch,
    scatter,
    tokens_of,
)

VARIANTS = get_args(get_type_hints(GTPOConfig)["variant"])
COMPARE = ["position", "response", "group"]
MEANS = ["arithmetic", "geometric"]
CONSTANTS, SIZES = [0.2, 0.3, 0.1 * 3, 1.0, 1e8, 1e8 + 0.1], [3, 6, 7, 8, 12]
SHAPES = list(itertools.product(VARIANTS, COMPARE, MEANS))


def make_config(variant, **options):
    extra = {"alpha1": 0.7, "kappa": 1.5} if variant in ("v1_clipped", "v2") else {"alpha": 0.3}
    return GTPOConfig(variant=variant, **{**extra, **options})


def token_rewards(entropy, mask, outcome, group_ids, config):
    """(B, T) rewards of the tokens of O+, and of those of O-, 0 elsewhere."""
    reward = gtpo_parts(entropy, mask, outcome, group_ids, config).reward
    won = success(outcome, config.success_threshold)[:, None]
    return reward * won, reward * ~won


def token_shares(entropy, mask, outcome, group_ids, config):
    """(B, T) shares of all tokens, 0 outside the mask."""
    shares = gtpo_shares(entropy, mask, outcome, group_ids, config)
    return torch.zeros(mask.shape, dtype=shares.dtype).masked_scatter(mask, shares)


@pytest.mark.parametrize("variant, compare, mean", SHAPES)
@pytest.mark.parametrize("scope", ["group", "batch"])
def test_rewards_equal_the_loops(variant, compare, mean, scope):
    config = make_config(variant, compare=compare, entropy_mean=mean, scope=scope)
    for seed in range(4):
        batch = ragged_batch(seed, empty_row=seed % 2 == 1)
        expected = [scatter(x, batch[1]) for x in gtpo_reward_lists(*batch, config)]
        for got, want in zip(token_rewards(*batch, config), expected):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("variant, compare, mean", SHAPES)
@pytest.mark.parametrize("normalize_over", ["zero_filled", "polarity"])
def test_advantages_equal_the_loops(variant, compare, mean, normalize_over):
    for scope, uniform, seed in itertools.product(["group", "batch"], [False, True], range(2)):
        config = make_config(
            variant,
            compare=compare,
            entropy_mean=mean,
            normalize_over=normalize_over,
            scope=scope,
            shape_uniform_groups=uniform,
        )
        batch = ragged_batch(seed, empty_row=seed == 1)
        mask, outcome, group_ids = batch[1:]
        penalty = penalties(len(outcome), seed) if seed else None
        lists = advantage_lists(*gtpo_reward_lists(*batch, config), outcome, group_ids, config, penalty)
        got = gtpo_advantages(*batch, config, length_penalty=penalty)
        torch.testing.assert_close(got, scatter(lists, mask), rtol=1e-7, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    num_groups=st.integers(1, 4),
    num_columns=st.integers(1, 12),
    shape=st.sampled_from(SHAPES),
    normalize_over=st.sampled_from(["zero_filled", "polarity"]),
    scope=st.sampled_from(["group", "batch"]),
)
def test_float32_batches_of_any_shape_equal_the_loops(seed, num_groups, num_columns, shape, normalize_over, scope):
    variant, compare, mean = shape
    config = make_config(
        variant, compare=compare, entropy_mean=mean, normalize_over=normalize_over, scope=scope, entropy_eps=1e-2
    )
    batch = ragged_batch(seed, num_groups, num_columns, empty_row=seed % 3 == 0, dtype=torch.float32)
    lists = advantage_lists(*gtpo_reward_lists(*batch, config), batch[2], batch[3], config)
    got = gtpo_advantages(*batch, config)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, scatter(lists, batch[1]).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("compare", COMPARE)
def test_v1_gives_out_one_plus_alpha_times_the_outcome(compare):
    config = GTPOConfig(variant="v1", alpha=0.4, compare=compare)
    for seed in range(5):
        entropy, mask, outcome, group_ids = ragged_batch(seed)
        total = gtpo_parts(entropy, mask, outcome, group_ids, config).reward.sum()
        expected = 1.4 * (mask.sum(-1) * outcome).sum()
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)


def test_v3_gives_out_the_same_at_every_position():
    config = GTPOConfig(alpha1=1.0, alpha2=0.25)
    for seed in range(5):
        entropy, mask, outcome, group_ids = ragged_batch(seed, num_groups=1)
        positive, negative = token_rewards(entropy, mask, outcome, group_ids, config)
        for rewards, sign, rows in ((positive, 1, outcome == 1), (negative, -1, outcome == 0)):
            lists = [row for row, keep in zip(tokens_of(rewards, mask), rows) if keep]
            for t in range(max((len(row) for row in lists), default=0)):
                alive = [row[t] for row in lists if len(row) > t]
                assert sum(alive) == pytest.approx(sign * 1.25 * len(alive), rel=1e-12)


@pytest.mark.parametrize("compare, mean", list(itertools.product(COMPARE, MEANS)))
def test_shares_are_one_where_no_token_is_uncertain(compare, mean):
    _, mask, outcome, group_ids = ragged_batch(1)
    config = GTPOConfig(compare=compare, entropy_mean=mean)
    shares = gtpo_shares(torch.zeros(mask.shape), mask, outcome, group_ids, config)
    torch.testing.assert_close(shares, torch.ones(int(mask.sum())))


def test_clip_bounds_the_reward():
    entropy, mask, outcome, group_ids = ragged_batch(3)
    config = GTPOConfig(variant="v2", alpha1=0.7, kappa=2.0)
    rewards, _ = token_rewards(entropy, mask, outcome, group_ids, config)
    own = rewards[mask & (outcome == 1)[:, None]]
    assert own.min() >= 1 and own.max() <= 0.7 + 0.7 / 2
    assert (own == 1).any() and (own == 0.7 + 0.7 / 2).any()


def test_a_clip_of_width_zero_is_allowed_and_rounds_to_one():
    config = GTPOConfig(variant="v1_clipped", alpha1=0.6, kappa=1.5)  # 0.6 + 0.4 is the limit
    entropy, mask, outcome, group_ids = ragged_batch(3)
    rewards, _ = token_rewards(entropy, mask, outcome, group_ids, config)
    assert set(rewards[mask & (outcome == 1)[:, None]].tolist()) == {1.0}


def test_zero_filled_keeps_the_outcome_where_polarity_cancels_it():
    """Zeros are included because the advantages of the correct tokens, normalized alone, sum to zero."""
    entropy, mask, outcome, group_ids = ragged_batch(4, num_groups=1, num_columns=40)
    right = mask & (outcome == 1)[:, None]
    assert 0 < right.sum() < mask.sum()
    alone = gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig(normalize_over="polarity"))
    filled = gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig())
    assert alone[right].sum().abs() < 1e-6 and (alone[right] < 0).float().mean() > 0.25
    assert (filled[right] > 0).all() and (filled[mask & ~right] < 0).all()


def test_uniform_groups_have_no_advantage_unless_asked():
    entropy, mask, _, group_ids = ragged_batch(2)
    for value in (0.0, 1.0):
        outcome = torch.full((len(group_ids),), value, dtype=torch.float64)
        for variant in VARIANTS:
            assert (gtpo_advantages(entropy, mask, outcome, group_ids, make_config(variant)) == 0).all()
        shaped = gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig(shape_uniform_groups=True))
        assert shaped[mask].abs().max() > 0.5 and (shaped[~mask] == 0).all()


@pytest.mark.parametrize("won", [True, False])
def test_a_row_without_tokens_does_not_make_its_group_a_mixed_one(won):
    """Nothing but noise would be left of the other rows' rewards: a zero mean and a unit variance."""
    entropy, mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(4, 6, dtype=torch.bool)
    mask[3] = False
    outcome = torch.tensor([won, won, won, not won]).double()
    for variant in VARIANTS:
        assert (gtpo_advantages(entropy, mask, outcome, torch.zeros(4).long(), make_config(variant)) == 0).all()


def test_a_wrong_token_is_pushed_up_once_wrong_ones_are_nearly_all_of_a_group():
    """In v3, one whose share is below [f (a1 + a2) - a1] / a2, where f is O-'s part of the group's tokens."""
    entropy = torch.rand(16, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) ** 3
    mask, one_group = torch.ones(16, 64, dtype=torch.bool), torch.zeros(16).long()
    for successes, limit in ((1, (15 / 16 * 1.1 - 1) / 0.1), (2, (14 / 16 * 1.1 - 1) / 0.1)):
        outcome = (torch.arange(16) < successes).double()
        batch = entropy, mask, outcome, one_group, GTPOConfig(compare="group")
        shares, advantages = token_shares(*batch)[successes:], gtpo_advantages(*batch)[successes:]
        assert ((advantages > 0) == (shares < limit)).all() and bool((advantages > 0).any()) == (limit > 0)


@pytest.mark.parametrize("threshold", [0.7, 0.9, 0.95, 0.01])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_reward_at_the_threshold_is_a_success_in_its_own_precision(threshold, dtype):
    """0.9 in float32 is below 0.9 in float64. Two right answers at the threshold, one above it, one wrong."""
    entropy, mask = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)), torch.ones(4, 6, dtype=torch.bool)
    outcome = torch.tensor([1.0, threshold, threshold, 0.0], dtype=dtype)
    config = GTPOConfig(success_threshold=threshold)
    assert success(outcome, threshold).tolist() == [True, True, True, False]
    reward = gtpo_parts(entropy, mask, outcome, torch.zeros(4).long(), config).reward
    assert (reward[:3] > 0).all() and (reward[3] < 0).all()
    advantages = gtpo_advantages(entropy, mask, outcome, torch.zeros(4).long(), config)
    assert advantages[3].max() < advantages[:3].min()
    assert not success(outcome[1:3] * 0.98, threshold).any()


def test_equal_rewards_up_to_rounding_have_next_to_no_advantage():
    """Shares of equal entropies may differ in their last digit, which the division by 1e-9 must not blow up."""
    mask = torch.ones(4, 3001, dtype=torch.bool)
    config = GTPOConfig(shape_uniform_groups=True, normalize_over="polarity")
    advantages = gtpo_advantages(torch.full(mask.shape, 0.3), mask, torch.ones(4), torch.zeros(4).long(), config)
    assert advantages.abs().max() < 1e-5


@pytest.mark.parametrize("variant, scope", list(itertools.product(VARIANTS, ["group", "batch"])))
@pytest.mark.parametrize("normalize_over", ["zero_filled", "polarity"])
def test_equal_rewards_have_no_advantage(variant, scope, normalize_over):
    """Exactly 0, whatever a mean of equal numbers rounds to."""
    without_entropy = {"alpha": 0.0} if variant == "v1" else {"alpha1": 1.0, "alpha2": 0.0}
    config = GTPOConfig(
        variant=variant, scope=scope, normalize_over=normalize_over, shape_uniform_groups=True, **without_entropy
    )
    for value, size, dtype in itertools.product(CONSTANTS, SIZES, [torch.float32, torch.float64]):
        if variant == "v2" and value < 1:
            continue  # -share, which differs
        entropy, mask = torch.rand(2 * size, 5), torch.ones(2 * size, 5, dtype=torch.bool)
        outcome, penalty = torch.full((2 * size,), value, dtype=dtype), torch.full((2 * size,), -0.1)
        for length_penalty in (None, penalty):
            advantages = gtpo_advantages(entropy, mask, outcome, torch.arange(2 * size) % 2, config, length_penalty)
            assert (advantages == 0).all(), (value, size, dtype)


def test_length_penalty_never_decides_success():
    entropy, mask, outcome, group_ids = ragged_batch(4)
    outcome = outcome + 0.2
    config = GTPOConfig(success_threshold=1.2, shape_uniform_groups=True)
    penalty = -outcome
    lists = advantage_lists(
        *gtpo_reward_lists(entropy, mask, outcome, group_ids, config), outcome, group_ids, config, penalty
    )
    got = gtpo_advantages(entropy, mask, outcome, group_ids, config, penalty)
    torch.testing.assert_close(got, scatter(lists, mask), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("variant, compare", list(itertools.product(VARIANTS, COMPARE)))
def test_order_of_rows_and_names_of_groups_do_not_matter(variant, compare):
    entropy, mask, outcome, group_ids = ragged_batch(5)
    config = make_config(variant, compare=compare)
    order = torch.randperm(len(outcome), generator=torch.Generator().manual_seed(0))
    plain = gtpo_advantages(entropy, mask, outcome, group_ids, config)
    moved = gtpo_advantages(entropy[order], mask[order], outcome[order], -7 * group_ids[order] + 10**12, config)
    torch.testing.assert_close(moved, plain[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("compare", COMPARE)
def test_padding_does_not_matter(compare):
    entropy, mask, outcome, group_ids = ragged_batch(6)
    config = GTPOConfig(compare=compare)
    plain = gtpo_advantages(entropy, mask, outcome, group_ids, config)
    for left, right in ((3, 0), (0, 3), (2, 5)):
        pad = (left, right)
        padded = gtpo_advantages(
            torch.nn.functional.pad(entropy, pad, value=float("inf")),
            torch.nn.functional.pad(mask, pad),
            outcome,
            group_ids,
            config,
        )
        torch.testing.assert_close(padded, torch.nn.functional.pad(plain, pad), rtol=1e-9, atol=1e-9)


def test_moving_one_response_within_its_row_does_not_matter():
    """Positions count action tokens, so a response that starts elsewhere or has holes is the same response."""
    values = torch.tensor([0.5, 1.0, 2.0])
    entropy, mask = torch.zeros(3, 8), torch.zeros(3, 8, dtype=torch.bool)
    for row, columns in enumerate(([0, 1, 2], [5, 6, 7], [1, 4, 6])):
        entropy[row, columns], mask[row, columns] = values, True
    shares = gtpo_shares(entropy, mask, torch.ones(3), torch.zeros(3).long(), GTPOConfig())
    torch.testing.assert_close(shares, torch.ones(9))


def test_entropy_is_never_backpropagated():
    entropy, mask, outcome, group_ids = ragged_batch(7, pad=0.0)
    entropy.requires_grad_()
    assert not gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig()).requires_grad
    assert not gtpo_parts(entropy, mask, outcome, group_ids, GTPOConfig()).reward.requires_grad


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes(dtype, expected):
    entropy, mask, outcome, group_ids = ragged_batch(8)
    entropy = entropy.to(dtype)
    got = gtpo_advantages(entropy, mask, outcome.float(), group_ids.int(), GTPOConfig())
    want = gtpo_advantages(entropy.double(), mask, outcome, group_ids, GTPOConfig())
    assert got.dtype == expected
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_a_group_of_32k_token_responses_keeps_its_digits():
    mask = torch.ones(4, 32768, dtype=torch.bool)
    mask[1, 20000:] = False
    entropy = torch.rand(mask.shape, generator=torch.Generator().manual_seed(0)) * 1e-3 + 1.0
    outcome, group_ids = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.zeros(4).long()
    config = GTPOConfig(variant="v1", alpha=1e-3, compare="group", shape_uniform_groups=True)
    lists = advantage_lists(*gtpo_reward_lists(entropy, mask, outcome, group_ids, config), outcome, group_ids, config)
    got = gtpo_advantages(entropy, mask, outcome, group_ids, config)
    torch.testing.assert_close(got, scatter(lists, mask).float(), rtol=1e-6, atol=0)


def test_empty_batches():
    none = torch.zeros(0).long()
    for shape in ((0, 5), (0, 0)):
        entropy = torch.zeros(shape)
        assert gtpo_advantages(entropy, entropy.bool(), torch.zeros(0), none, GTPOConfig()).shape == shape
    outcome, group_ids = torch.tensor([1.0, 0.0]), torch.zeros(2).long()
    for compare in COMPARE:
        for columns in (0, 3):
            entropy = torch.zeros(2, columns)
            advantages = gtpo_advantages(entropy, entropy.bool(), outcome, group_ids, GTPOConfig(compare=compare))
            assert torch.equal(advantages, torch.zeros(2, columns))


@pytest.mark.parametrize("normalize_over", ["zero_filled", "polarity"])
@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_a_batch_of_one_row(normalize_over, outcome):
    config = GTPOConfig(scope="batch", normalize_over=normalize_over, shape_uniform_groups=True, compare="response")
    batch = torch.tensor([[1.0, 2.0]]), torch.ones(1, 2, dtype=torch.bool), torch.tensor([outcome]), torch.tensor([5])
    half = 0.5**0.5
    # The uncertain token has the higher reward in both polarities: on O- the certain one bears more of the blame.
    torch.testing.assert_close(gtpo_advantages(*batch, config), torch.tensor([[-half, half]]))
