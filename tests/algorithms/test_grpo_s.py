"""GRPO-S rewards and advantages against loops, OpenRLHF's group_norm and known cases."""

import itertools
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.algorithms import GRPOSConfig, GTPOConfig, grpo_s_advantages, grpo_s_parts, gtpo_advantages, success
from tests.support.algorithms_reference import advantage_lists, grpo_s_reward_lists, penalties, ragged_batch

VARIANTS = get_args(get_type_hints(GRPOSConfig)["variant"])
SHAPES = list(itertools.product(VARIANTS, ["arithmetic", "geometric"]))


def column(lists):
    return torch.tensor([row[0] for row in lists], dtype=torch.float64)


def sequence_rewards(entropy, mask, outcome, group_ids, config):
    """(B,) rewards of the rows of O+, and of those of O-, 0 elsewhere."""
    reward = grpo_s_parts(entropy, mask, outcome, group_ids, config).reward
    won = success(outcome, config.success_threshold)
    return reward * won, reward * ~won


@pytest.mark.parametrize("variant, mean", SHAPES)
def test_rewards_equal_the_loops(variant, mean):
    config = GRPOSConfig(variant=variant, entropy_mean=mean, beta=0.3)
    for seed in range(6):
        batch = ragged_batch(seed, empty_row=seed % 2 == 1)
        for got, want in zip(sequence_rewards(*batch, config), grpo_s_reward_lists(*batch, config)):
            torch.testing.assert_close(got, column(want), rtol=1e-11, atol=1e-12)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 10_000),
    num_groups=st.integers(1, 5),
    shape=st.sampled_from(SHAPES),
    normalize_over=st.sampled_from(["zero_filled", "polarity"]),
    scope=st.sampled_from(["group", "batch"]),
    uniform=st.booleans(),
    penalised=st.booleans(),
)
def test_advantages_equal_the_loops(seed, num_groups, shape, normalize_over, scope, uniform, penalised):
    variant, mean = shape
    config = GRPOSConfig(
        variant=variant,
        entropy_mean=mean,
        normalize_over=normalize_over,
        scope=scope,
        shape_uniform_groups=uniform,
        beta=0.3,
    )
    batch = ragged_batch(seed, num_groups, empty_row=seed % 3 == 0)
    mask, outcome, group_ids = batch[1:]
    penalty = penalties(len(outcome), seed) if penalised else None
    lists = advantage_lists(*grpo_s_reward_lists(*batch, config), outcome, group_ids, config, penalty)
    got = grpo_s_advantages(*batch, config, length_penalty=penalty)
    torch.testing.assert_close(got, column(lists)[:, None] * mask, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("group_size", [2, 3, 5, 7, 8, 16, 64])
def test_beta_zero_is_openrlhf_group_norm_bit_for_bit(group_size):
    generator = torch.Generator().manual_seed(group_size)
    num_rows = 12 * group_size
    outcome = (torch.rand(num_rows, generator=generator) < 0.4).float()
    entropy = torch.rand(num_rows, 5, generator=generator)
    mask = torch.ones(num_rows, 5, dtype=torch.bool)
    group_ids = torch.arange(num_rows) // group_size

    rewards = outcome.reshape(-1, group_size)
    rewards = (rewards - rewards.mean(-1, keepdim=True)) / (rewards.std(-1, keepdim=True) + 1e-9)

    got = grpo_s_advantages(entropy, mask, outcome, group_ids, GRPOSConfig(variant="v1", beta=0.0))
    assert torch.equal(got, rewards.reshape(-1, 1).expand(-1, 5))


def test_rewards_add_up():
    """Sum of r-hat = (1 + beta) sum of r over O+ (3.5.2), and each v3 polarity hands out beta1 + beta2 per row."""
    for seed in range(5):
        batch = ragged_batch(seed, num_groups=1)
        outcome = batch[2]
        positive, negative = sequence_rewards(*batch, GRPOSConfig(variant="v1", beta=0.4))
        torch.testing.assert_close(positive.sum(), 1.4 * outcome.sum())
        assert (negative == 0).all()
        positive, negative = sequence_rewards(*batch, GRPOSConfig(beta1=1.0, beta2=0.3))
        torch.testing.assert_close(positive.sum(), 1.3 * outcome.sum())
        torch.testing.assert_close(negative.sum(), -1.3 * (1 - outcome).sum())


@pytest.mark.parametrize(
    "normalize_over, scope", list(itertools.product(["zero_filled", "polarity"], ["group", "batch"]))
)
@pytest.mark.parametrize("variant", ["v1", "v3"])
def test_one_token_answers_make_gtpo_and_grpo_s_agree(variant, normalize_over, scope):
    generator = torch.Generator().manual_seed(0)
    entropy = torch.rand(12, 1, generator=generator, dtype=torch.float64)
    outcome = torch.tensor([1.0, 0.0, 1.0, 0.0] * 3)
    group_ids = torch.arange(12) // 4
    mask = torch.ones(12, 1, dtype=torch.bool)
    options = {"normalize_over": normalize_over, "scope": scope}
    token = gtpo_advantages(entropy, mask, outcome, group_ids, GTPOConfig(variant=variant, alpha=0.2, **options))
    row = grpo_s_advantages(entropy, mask, outcome, group_ids, GRPOSConfig(variant=variant, beta=0.2, **options))
    torch.testing.assert_close(token, row, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_entropies_give_every_row_the_mean_share(variant):
    _, mask, outcome, group_ids = ragged_batch(1)
    positive, negative = sequence_rewards(
        torch.zeros(mask.shape), mask, outcome, group_ids, GRPOSConfig(variant=variant)
    )
    won = outcome == 1
    torch.testing.assert_close(positive[won], torch.full_like(positive[won], 1.1))
    lost = {"v1": 0.0, "v2": -1.0, "v3": -1.1}[variant]
    torch.testing.assert_close(negative[~won], torch.full_like(negative[~won], lost))


def test_a_row_without_tokens_leaves_the_other_shares_alone():
    entropy, mask = torch.full((4, 3), 2.0), torch.ones(4, 3, dtype=torch.bool)
    mask[3] = False
    outcome, group_ids = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4).long()
    _, negative = sequence_rewards(entropy, mask, outcome, group_ids, GRPOSConfig())
    torch.testing.assert_close(negative, torch.tensor([0.0, -1.1, -1.1, -1.1]).double())
    advantages = grpo_s_advantages(entropy, mask, outcome, group_ids, GRPOSConfig())
    assert torch.isfinite(advantages).all() and (advantages[3] == 0).all()


@pytest.mark.parametrize("variant, mean", SHAPES)
def test_row_order_and_padding_do_not_matter(variant, mean):
    entropy, mask, outcome, group_ids = ragged_batch(5)
    config = GRPOSConfig(variant=variant, entropy_mean=mean)
    plain = grpo_s_advantages(entropy, mask, outcome, group_ids, config)
    order = torch.randperm(len(outcome), generator=torch.Generator().manual_seed(0))
    moved = grpo_s_advantages(entropy[order], mask[order], outcome[order], group_ids[order], config)
    torch.testing.assert_close(moved, plain[order], rtol=1e-9, atol=1e-9)
    pad = torch.nn.functional.pad
    padded = grpo_s_advantages(pad(entropy, (2, 3)), pad(mask, (2, 3)), outcome, group_ids, config)
    torch.testing.assert_close(padded, pad(plain, (2, 3)), rtol=1e-9, atol=1e-9)


def test_uniform_groups_have_no_advantage_unless_asked():
    entropy, mask, outcome, group_ids = ragged_batch(2)
    ones = torch.ones_like(outcome)
    assert (grpo_s_advantages(entropy, mask, ones, group_ids, GRPOSConfig()) == 0).all()
    assert grpo_s_advantages(entropy, mask, ones, group_ids, GRPOSConfig(shape_uniform_groups=True)).abs().max() > 0.5


def test_lone_winner_normalised_alone_has_no_advantage():
    """A polarity of one row has std 0, not NaN."""
    entropy, mask = torch.linspace(0.1, 1.2, 12).view(3, 4), torch.ones(3, 4, dtype=torch.bool)
    config = GRPOSConfig(normalize_over="polarity")
    advantages = grpo_s_advantages(entropy, mask, torch.tensor([1.0, 0, 0]), torch.zeros(3).long(), config)
    assert (advantages[0] == 0).all() and torch.isfinite(advantages).all()


@pytest.mark.parametrize(
    "dtype, expected",
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_dtypes(dtype, expected):
    entropy, mask, outcome, group_ids = ragged_batch(8)
    entropy = entropy.to(dtype)
    got = grpo_s_advantages(entropy, mask, outcome.float(), group_ids, GRPOSConfig())
    want = grpo_s_advantages(entropy.double(), mask, outcome, group_ids, GRPOSConfig())
    assert got.dtype == expected
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)


def test_sequence_entropy():
    entropy = torch.tensor([[1.0, 4.0, float("nan")], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [False, False, False]])
    batch = entropy, mask, torch.ones(2), torch.zeros(2).long()
    assert grpo_s_parts(*batch, GRPOSConfig()).row_entropy.tolist() == [2.5, 1e-6]
    geometric = grpo_s_parts(*batch, GRPOSConfig(entropy_mean="geometric")).row_entropy
    torch.testing.assert_close(geometric, torch.tensor([2.0, 1e-6]).double())


@pytest.mark.parametrize("variant, scope", list(itertools.product(["v1", "v3"], ["group", "batch"])))
@pytest.mark.parametrize("normalize_over", ["zero_filled", "polarity"])
def test_equal_rewards_have_no_advantage(variant, scope, normalize_over):
    """Exactly 0, whatever a mean of equal numbers rounds to."""
    config = GRPOSConfig(
        variant=variant, scope=scope, normalize_over=normalize_over, shape_uniform_groups=True, beta=0.0, beta2=0.0
    )
    for value, size, dtype in itertools.product(
        [0.2, 0.3, 0.1 * 3, 1.0, 1e8, 1e8 + 0.1], [3, 6, 7, 8, 12], [torch.float32, torch.float64]
    ):
        entropy, mask = torch.rand(2 * size, 5), torch.ones(2 * size, 5, dtype=torch.bool)
        outcome, penalty = torch.full((2 * size,), value, dtype=dtype), torch.full((2 * size,), -0.1)
        for length_penalty in (None, penalty):
            advantages = grpo_s_advantages(entropy, mask, outcome, torch.arange(2 * size) % 2, config, length_penalty)
            assert (advantages == 0).all(), (value, size, dtype)
