"""Advantages land on their own rows, entropies do not leak, and upstream's other duties are kept."""

import copy
import dataclasses
from collections.abc import Callable
from statistics import mean, stdev
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import (
    Experience,
    balance_experiences,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
)
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

from openrlhf_gtpo.algorithms import (
    ESTIMATORS,
    CreditParts,
    Estimator,
    GRPOSConfig,
    GTPOConfig,
    grpo_s_advantages,
    gtpo_advantages,
    success,
)
from openrlhf_gtpo.algorithms.config import Settings, setting
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, share_routes
from openrlhf_gtpo.training.rows import Row
from openrlhf_gtpo.training.settings.algorithms import AGGREGATION
from tests.support import rollouts
from tests.support.algorithms_reference import grop_list, rescaling_list
from tests.support.rollouts import PAD, Rollout, arguments, in_sampling_order, maker, rollout

# How micro-batches are cut: in order, or balanced by length over the ranks (rows permuted, widths differ).
LAYOUTS = {
    "in order": (),
    "dynamic": ("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "30"),
    "two ranks, two copies": (
        *("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "20"),
        *("--actor.num_gpus_per_node", "4", "--ds.tensor_parallel_size", "2"),
    ),
}


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return LAYOUTS[request.param]


def make(
    args: SimpleNamespace,
    batch: Rollout,
    monkeypatch: pytest.MonkeyPatch,
    kind: type = ExperienceMaker,
    kl_coef: float = 0.0,
) -> tuple[Any, list[Experience]]:
    made = maker(kind, args, batch, monkeypatch, kl_coef)
    return made, rollouts.make(made, batch)


def advantages(experiences: list[Experience], batch: Rollout) -> torch.Tensor:
    return in_sampling_order(experiences, "advantages", batch.mask.shape[1])


# ── The formula reaches the rows it is for ──


@pytest.mark.parametrize(
    "options",
    [{}, {"variant": "v1"}, {"variant": "v2", "scope": "batch"}, {"compare": "group", "alpha2": 0.5}],
    ids=str,
)
def test_gtpo_advantages_are_those_of_the_batch_in_sampling_order(
    options: dict[str, Any], layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=1)
    words = [word for name, value in options.items() for word in (f"--algo.gtpo.{name}", str(value))]
    made, experiences = make(arguments("--algo.advantage.estimator", "gtpo", *words, *layout), batch, monkeypatch)
    assert len(experiences) > 2
    if layout:
        assert [row for e in experiences for row in e.index] != list(range(20)), "the rows came in order"
        assert len({e.action_mask.shape[1] for e in experiences}) > 1, "all micro-batches have the same width"
    expected = gtpo_advantages(batch.entropy, batch.mask, batch.outcome, batch.group_ids, GTPOConfig(**options))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(advantages(experiences, batch), expected)


@pytest.mark.parametrize("options", [{}, {"variant": "v2", "beta": 0.5}, {"entropy_mean": "geometric"}], ids=str)
def test_grpo_s_advantages_are_those_of_the_batch_in_sampling_order(
    options: dict[str, Any], layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=2)
    words = [word for name, value in options.items() for word in (f"--algo.grpo_s.{name}", str(value))]
    _, experiences = make(arguments("--algo.advantage.estimator", "grpo_s", *words, *layout), batch, monkeypatch)
    expected = grpo_s_advantages(batch.entropy, batch.mask, batch.outcome, batch.group_ids, GRPOSConfig(**options))
    torch.testing.assert_close(advantages(experiences, batch), expected)


def test_grpo_s_v1_without_entropy_is_upstreams_group_norm_exactly(
    layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=3)
    ours = ("--algo.advantage.estimator", "grpo_s", "--algo.grpo_s.variant", "v1", "--algo.grpo_s.beta", "0")
    _, experiences = make(arguments(*ours, *layout), batch, monkeypatch)
    upstream_args = arguments("--algo.advantage.estimator", "group_norm", *layout)
    _, expected = make(upstream_args, batch, monkeypatch, RemoteExperienceMaker)
    assert torch.equal(advantages(experiences, batch), advantages(expected, batch) * batch.mask)


WITHIN_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


@pytest.mark.parametrize("samples", [3, 6, 7, 8, 12])
@pytest.mark.parametrize("estimator", [*WITHIN_GROUPS, "reinforce", "flash_reinforce", "forking_tokens"])
def test_equal_rewards_have_advantage_0(estimator: str, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of equal float32 numbers is rounded, so that they differ from it, and their std is not 0."""
    for reward in (0.2, 0.3, 0.7, 1 / 3, -0.1, 1e-3, 123.4):
        batch = rollout(seed=6, samples=samples)
        batch.outcome[:] = reward
        made, experiences = make(
            arguments("--algo.advantage.estimator", estimator, samples=samples), batch, monkeypatch
        )
        assert not advantages(experiences, batch)[batch.mask].any(), reward
        if estimator in (*WITHIN_GROUPS, "forking_tokens"):
            assert not any(e.info["group_reward_std"].any() for e in experiences), reward
        for experience in experiences:
            given = torch.full_like(experience.rewards, reward)
            assert torch.equal(experience.rewards, given) and torch.equal(experience.info["reward"], given)


@pytest.mark.parametrize("estimator", WITHIN_GROUPS)
def test_one_group_of_equal_rewards_leaves_the_others_as_upstream_has_them(
    estimator: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards are compared after their length penalty. reinforce_baseline subtracts the batch's mean at last."""
    argv = ("--algo.advantage.estimator", estimator, *layout)
    argv += ("--reward.stop_properly_penalty_coef", "-0.3", "--algo.advantage.no_std_norm")
    batch = rollout(seed=7, binary=False)
    equal, cut = slice(0, 4), slice(4, 8)
    batch.outcome[equal], batch.truncated[equal], batch.truncated[cut] = 0.7, False, True
    _, experiences = make(arguments(*argv), batch, monkeypatch)
    _, expected = make(arguments(*argv), batch, monkeypatch, RemoteExperienceMaker)
    found, upstreams = advantages(experiences, batch) * batch.mask, advantages(expected, batch) * batch.mask
    torch.testing.assert_close(found, upstreams, rtol=0, atol=1e-6 if estimator != "group_norm" else 10)
    if estimator == "reinforce_baseline":
        return
    assert torch.equal(found[8:], upstreams[8:]) and not found[:8].any() and found[8:].any()


@pytest.mark.parametrize(
    "estimator", ["gae", "reinforce", "rloo", "reinforce_baseline", "group_norm", "dr_grpo", "flash_reinforce"]
)
def test_upstreams_estimators_give_what_upstream_gives(
    estimator: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=4, binary=False)
    argv = ("--algo.advantage.estimator", estimator, "--reward.overlong_buffer_len", "3", *layout)
    argv += ("--rollout.max_new_tokens", "8")
    _, expected = make(arguments(*argv), batch, monkeypatch, RemoteExperienceMaker, kl_coef=0.1)
    for entropy in ((), ("--logger.entropy_enable",)):
        made, experiences = make(arguments(*argv, *entropy), batch, monkeypatch, kl_coef=0.1)
        assert len(experiences) == len(expected)
        for found, wanted in zip(experiences, expected, strict=True):
            assert_same_experience(found, wanted)
        assert (names.ENTROPY_ALL in made.metrics) == bool(entropy)


@pytest.mark.parametrize(
    ("estimator", "credit"),
    [
        ("group_norm", lambda own, group: (own - mean(group)) / (stdev(group) + 1e-9)),
        ("dr_grpo", lambda own, group: own - mean(group)),
        ("rloo", lambda own, group: own - (sum(group) - own) / (len(group) - 1)),
    ],
)
def test_upstreams_credits_are_their_papers(
    estimator: str, credit: Callable[[float, list[float]], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GRPO's (arXiv 2402.03300), Dr. GRPO's (2503.20783) and RLOO's (2402.14740), response by response."""
    batch = rollout(seed=5, binary=False)
    _, experiences = make(arguments("--algo.advantage.estimator", estimator), batch, monkeypatch)
    rows = list(zip(batch.outcome.tolist(), batch.group_ids.tolist()))
    expected = torch.tensor([credit(own, [other for other, of in rows if of == group]) for own, group in rows])
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(
        advantages(experiences, batch)[batch.mask],
        expected[:, None].expand_as(batch.mask)[batch.mask],
        rtol=1e-6,
        atol=1e-6,
    )


def assert_same_experience(found: Experience, wanted: Experience) -> None:
    for field in dataclasses.fields(Experience):
        values = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(values[1], torch.Tensor):
            assert torch.equal(*values), field.name
        elif field.name == "info":
            assert values[0].keys() == values[1].keys()
            assert all(torch.equal(values[0][key], value) for key, value in values[1].items())
        else:
            assert values[0] == values[1], field.name


@dataclasses.dataclass(frozen=True)
class OutcomeConfig(Settings):
    """The settings of an estimator that nobody knows."""

    scale: float = setting(1.0, "what a response's outcome is multiplied by")
    success_threshold: float = setting(0.5, "as in GTPO")


def test_a_new_estimator_is_a_line_in_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its choice, flags, settings, credit, loss level and metrics all follow from that line."""

    def scaled(*batch: Any) -> torch.Tensor:
        entropy, mask, outcome, group_ids, config, length_penalty = batch
        return config.scale * (outcome[:, None] - 0.25) * mask

    def parts(*batch: Any) -> CreditParts:
        return CreditParts(*[batch[2]] * 4)

    mine = Estimator("scaled outcomes", OutcomeConfig, "sequence", scaled, lambda *batch: batch[2], parts)
    monkeypatch.setitem(ESTIMATORS, "outcome", mine)
    args = arguments("--algo.advantage.estimator", "outcome", "--algo.outcome.scale", "3")
    assert args.actor.loss_agg_mode == AGGREGATION["sequence"]
    batch = rollout(seed=20)
    made, experiences = make(args, batch, monkeypatch)
    assert made.credit.config == OutcomeConfig(scale=3.0)
    assert torch.equal(advantages(experiences, batch), 3 * (batch.outcome[:, None] - 0.25) * batch.mask)
    assert made.metrics[names.ADVANTAGE_MAX] == 2.25 and names.ENTROPY_POSITIVE in made.metrics


# ── Upstream's duties ──


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
def test_the_experience_is_what_upstreams_trainer_expects(
    estimator: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=5, holes=False)  # upstream's overlong penalty counts the tokens between two turns too
    argv = ("--reward.overlong_buffer_len", "3", "--rollout.max_new_tokens", "8", *layout)
    _, experiences = make(arguments("--algo.advantage.estimator", estimator, *argv), batch, monkeypatch)
    upstream_args = arguments("--algo.advantage.estimator", "group_norm", *argv)
    _, expected = make(upstream_args, batch, monkeypatch, RemoteExperienceMaker)
    for found, wanted in zip(experiences, expected, strict=True):
        assert set(vars(found)) == set(vars(wanted)), "nothing may be left on the experience"
        assert found.kl is None
        assert found.info.keys() == wanted.info.keys()
        for name in ("group_reward_std", "reward", "kl"):
            torch.testing.assert_close(found.info[name], wanted.info[name])
        assert found.info["return"].shape == wanted.info["return"].shape
        torch.testing.assert_close(found.rewards, wanted.rewards)
        assert found.advantages.shape == found.returns.shape == found.action_mask.shape
        assert found.advantages.dtype == found.returns.dtype == torch.float32
        assert torch.equal(found.returns, found.advantages)
        assert found.advantages.data_ptr() != found.returns.data_ptr()
        tokens = found.action_mask.sum(-1)
        torch.testing.assert_close(found.info["return"], found.advantages.sum(-1) / tokens)


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
def test_upstreams_batch_helpers_work_on_the_result(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(seed=6)
    args = arguments("--algo.advantage.estimator", estimator, *LAYOUTS["dynamic"])
    _, experiences = make(args, batch, monkeypatch)
    expected = advantages(experiences, batch)
    order = [row for e in experiences for row in e.index]

    def wide(values: torch.Tensor) -> torch.Tensor:
        """``values`` in sampling order and as wide as ``expected``."""
        missing = expected.shape[1] - values.shape[1]
        return torch.nn.functional.pad(values, (0, missing))[torch.tensor(order).argsort()]

    joined = Experience.concat_experiences(copy.deepcopy(experiences), PAD)
    assert torch.equal(wide(joined.advantages), expected)
    items = [item for e in copy.deepcopy(experiences) for item in split_experience_batch(e)]
    assert len(items) == 20
    assert torch.equal(wide(make_experience_batch(remove_padding_in_sequences(items)).advantages), expected)

    args.actor.num_gpus_per_node = 4
    balanced = balance_experiences(copy.deepcopy(experiences), args)
    assert len(balanced) == 4 and sum(len(e.sequences) for e in balanced) == 20
    for e in balanced:
        rows = e.sequences[:, 0] - 1
        assert torch.equal(e.advantages, expected[rows][:, : e.advantages.shape[1]])


# ── Length penalties: after shaping, never deciding success ──


def penalty_of(batch: Rollout, soft: float, hard: int, form: str, factor: float) -> torch.Tensor:
    """R(i) by the formulas of §6, one row at a time; |o| counts action tokens, not the span that they lie in."""
    result = []
    for length in batch.mask.sum(-1).tolist():
        inside = (soft - length) / (hard - soft if form == "continuous" else hard)
        result.append(factor * (0.0 if length <= soft else -1.0 if length > hard else inside))
    return torch.tensor(result)


@pytest.mark.parametrize(
    ("estimator", "form", "factor", "buffer"),
    [  # every pair of values at least once
        ("gtpo", "continuous", 1.0, 4),
        ("gtpo", "as_printed", 0.25, 2.5),
        ("gtpo", "continuous", 0.25, 0.5),
        ("grpo_s", "as_printed", 0.25, 4),
        ("grpo_s", "continuous", 1.0, 2.5),
        ("grpo_s", "as_printed", 1.0, 0.5),
    ],
)
def test_overlong_penalty_is_added_after_shaping(
    estimator: str, form: str, factor: float, buffer: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, hard = rollout(seed=7), 7
    args = arguments(
        *("--algo.advantage.estimator", estimator, "--rollout.max_new_tokens", str(hard), *LAYOUTS["dynamic"]),
        *("--reward.overlong_buffer_len", str(buffer), "--reward.overlong_penalty_factor", str(factor)),
        *("--reward.overlong_form", form),
    )
    _, experiences = make(args, batch, monkeypatch)
    penalty = penalty_of(batch, hard - buffer, hard, form, factor)
    assert (penalty < 0).sum() > 2
    assert_penalised(estimator, experiences, batch, penalty)


@pytest.mark.parametrize(
    ("estimator", "form"), [("gtpo", "group_relative"), ("grpo_s", "group_relative"), ("gtpo", "group_rescaled")]
)
def test_penalties_within_groups_need_no_buffer(
    estimator: str, form: str, layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = rollout(seed=9)
    argv = ("--algo.advantage.estimator", estimator, "--reward.overlong_form", form)
    args = arguments(*argv, "--reward.overlong_penalty_factor", "0.5", *layout)
    _, experiences = make(args, batch, monkeypatch)
    lengths, won = batch.mask.sum(-1), success(batch.outcome)
    penalty = 0.5 * torch.tensor(grop_list(lengths, won, batch.group_ids))
    if form == "group_rescaled":
        penalty = torch.tensor(rescaling_list(lengths, batch.outcome, batch.group_ids, 0.5))
    assert (penalty < 0).sum() > 2
    assert_penalised(estimator, experiences, batch, penalty.float())


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
@pytest.mark.parametrize("form", ["continuous", "as_printed"])
@pytest.mark.parametrize("coefficient", [0.5, -0.5])
def test_stop_properly_penalty_comes_after_the_overlong_one(
    estimator: str, form: str, coefficient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, hard, soft = rollout(seed=8), 7, 4
    args = arguments(
        *("--algo.advantage.estimator", estimator, "--rollout.max_new_tokens", str(hard), *LAYOUTS["dynamic"]),
        *("--reward.overlong_buffer_len", "3", "--reward.overlong_form", form),
        *("--reward.stop_properly_penalty_coef", str(coefficient)),
    )
    _, experiences = make(args, batch, monkeypatch)
    rewards = batch.outcome + penalty_of(batch, soft, hard, form, 1.0)
    truncated = torch.full_like(rewards, coefficient) if coefficient < 0 else rewards * coefficient
    assert_penalised(estimator, experiences, batch, torch.where(batch.truncated, truncated, rewards) - batch.outcome)


@pytest.mark.parametrize("estimator", ["forking_tokens", "entropy_bonus"])
def test_rows_penalized_down_to_one_reward_have_nothing_to_compare(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are cut off, some of them with a partial or a whole success."""
    batch = rollout(seed=8, binary=False)
    batch.truncated[:] = True
    args = arguments("--algo.advantage.estimator", estimator, "--reward.stop_properly_penalty_coef", "-0.7")
    _, experiences = make(args, batch, monkeypatch)
    assert advantages(experiences, batch).abs().max() < 1e-6
    assert all((one.rewards == one.rewards[0]).all() for one in experiences)


def assert_penalised(estimator: str, experiences: list[Experience], batch: Rollout, penalty: torch.Tensor) -> None:
    shape, config = (gtpo_advantages, GTPOConfig()) if estimator == "gtpo" else (grpo_s_advantages, GRPOSConfig())
    inputs = (batch.entropy, batch.mask, batch.outcome, batch.group_ids, config)
    expected = shape(*inputs, penalty)
    assert not torch.allclose(expected, shape(*inputs)), "the penalty changes nothing: the test shows nothing"
    torch.testing.assert_close(advantages(experiences, batch), expected, rtol=1e-4, atol=1e-4)
    rewards = batch.outcome + penalty
    torch.testing.assert_close(in_sampling_order(experiences, "rewards", 0), rewards)
    infos = torch.cat([e.info["reward"] for e in experiences])
    torch.testing.assert_close(infos, torch.cat([e.rewards for e in experiences]))


class RewardModel:
    """Ray actors that know the outcomes of ``batch``, by the rows' first tokens."""

    def __init__(self, batch: Rollout) -> None:
        self.outcome = batch.outcome

    def async_run_method_batch(self, method_name: str, sequences: list[torch.Tensor], **rest: Any) -> list[Any]:
        return [[self.outcome[tokens[:, 0] - 1] for tokens in sequences]]


def test_success_is_decided_in_the_precision_of_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model's bfloat16 0.9 is below 0.9 once read as float32; metrics and shaping both call it a success."""
    batch = rollout(seed=9)
    batch.outcome = (batch.outcome * 0.9).to(torch.bfloat16)
    args = arguments("--algo.advantage.estimator", "gtpo", "--algo.gtpo.success_threshold", "0.9")
    made = maker(ExperienceMaker, args, batch, monkeypatch)
    made.models = made.models._replace(reward=RewardModel(batch))
    experiences = made.make([dataclasses.replace(row, reward=None, score=None) for row in batch.rows()])
    right = (batch.outcome > 0.5)[:, None] & batch.mask
    found = advantages(experiences, batch)
    assert (found[right] >= 0).all() and (found[right] > 0).any() and (found[batch.mask & ~right] <= 0).all()
    assert made.metrics["groups/uniform"] < made.metrics["groups/total"]


def test_a_success_in_float32_is_one_in_float64() -> None:
    """An agent's reward may be float64, and cli.evaluate has Python's numbers; most rewards are float32."""
    for dtype in (torch.float32, torch.float64):
        assert success(torch.tensor([0.7 + 0.2 + 0.1, 0.99999], dtype=dtype)).tolist() == [True, False]


# ── Reward clipping and the KL reward ──


@pytest.mark.parametrize("estimator", ["gtpo", "grpo_s"])
def test_advantages_are_clipped_to_the_reward_range(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(seed=9)
    args = arguments("--algo.advantage.estimator", estimator, "--reward.clip_range", "-0.5", "0.25")
    _, experiences = make(args, batch, monkeypatch)
    _, free = make(arguments("--algo.advantage.estimator", estimator), batch, monkeypatch)
    expected = advantages(free, batch)
    assert expected.max() > 0.25 and expected.min() < -0.5
    assert torch.equal(advantages(experiences, batch), expected.clamp(-0.5, 0.25))


def test_kl_reward_is_added_to_gtpo_as_upstream_adds_it(
    layout: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, coefficient = rollout(seed=10), 0.1
    argv = ("--algo.kl.estimator", "k1", *layout)
    gtpo = arguments("--algo.advantage.estimator", "gtpo", *argv)
    found = advantages(make(gtpo, batch, monkeypatch, kl_coef=coefficient)[1], batch)
    found -= advantages(make(gtpo, batch, monkeypatch)[1], batch)
    plain = arguments("--algo.advantage.estimator", "group_norm", *argv)
    expected = advantages(make(plain, batch, monkeypatch, RemoteExperienceMaker, coefficient)[1], batch)
    expected = expected - advantages(make(plain, batch, monkeypatch, RemoteExperienceMaker)[1], batch)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected * batch.mask, rtol=1e-4, atol=1e-5)


def test_kl_reward_is_the_same_at_all_tokens_of_a_row_with_grpo_s(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, coefficient = rollout(seed=11), 0.1
    args = arguments("--algo.advantage.estimator", "grpo_s", "--algo.kl.estimator", "k1")
    found = advantages(make(args, batch, monkeypatch, kl_coef=coefficient)[1], batch)
    found -= advantages(make(args, batch, monkeypatch)[1], batch)
    total = ((batch.log_probs - batch.reference) * batch.mask).sum(-1)
    torch.testing.assert_close(found, -coefficient * total[:, None] * batch.mask, rtol=1e-4, atol=1e-5)


# ── Data that must not be learned from ──


@pytest.mark.parametrize("what", ["entropy", "log_probs", "outcome", "reference"])
@pytest.mark.parametrize("use_loss", [(), ("--algo.kl.use_loss",)], ids=["kl reward", "kl loss"])
def test_a_value_that_is_not_finite_stops_the_step_and_names_the_row(
    what: str, use_loss: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = arguments("--algo.advantage.estimator", "gtpo", *LAYOUTS["dynamic"], *use_loss)
    row = 14  # of prompt 3
    for value in (float("nan"), float("inf"), float("-inf")):
        batch = rollout(seed=13)
        if what == "outcome":
            batch.outcome[row] = value
        else:
            getattr(batch, what)[row, int(batch.mask[row].nonzero()[0])] = value
        made = maker(ExperienceMaker, args, batch, monkeypatch, kl_coef=0.1)
        if what == "reference" and not use_loss and value in (float("inf"), float("-inf")):
            rollouts.make(made, batch)  # upstream clamps the KL that it computes from it
            continue
        with pytest.raises(TrainingStopped) as stopped:
            rollouts.make(made, batch)
        message = str(stopped.value)
        assert message.startswith(f"Row {row} of the rollout batch (1 of 20 rows are affected) has a ")
        assert " that is not finite; the step stopped before any weight changed. " in message
        assert message.endswith("Its prompt: 'prompt 3'")
        assert {"entropy": "entropy", "log_probs": "log-prob", "outcome": "reward"}.get(what, "reference") in message


def test_what_lies_outside_the_mask_is_never_read(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(seed=14)
    args = arguments("--algo.advantage.estimator", "gtpo", *LAYOUTS["dynamic"])
    expected = advantages(make(args, batch, monkeypatch)[1], batch)
    batch.entropy[~batch.mask] = float("nan")
    assert torch.equal(advantages(make(args, batch, monkeypatch)[1], batch), expected)


def test_entropies_of_one_batch_are_gone_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rollout(seed=16), rollout(seed=17, prompts=3)
    args = arguments("--algo.advantage.estimator", "gtpo")
    made, experiences = make(args, first, monkeypatch)
    assert all(set(vars(e)) == set(vars(Experience())) for e in experiences)
    made.models.actor.tables = (second.log_probs, second.entropy)
    found = advantages(rollouts.make(made, second), second)
    assert torch.equal(found, advantages(make(args, second, monkeypatch)[1], second))


# ── Metrics ──


def test_rows_carry_what_a_surrogate_reads_of_their_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """With any estimator, whichever micro-batch a row is in; and no other surrogate's rows carry it."""
    batch = rollout()
    correct = (batch.outcome >= 1).float()
    accuracy = torch.stack([correct[batch.group_ids == group].mean() for group in batch.group_ids])
    for estimator, surrogate in (("group_norm", "htpo"), ("gtpo", "htpo"), ("group_norm", "cispo")):
        flags = ("--algo.advantage.estimator", estimator, "--actor.policy_loss_type", surrogate)
        made = maker(ExperienceMaker, arguments(*flags, "--algo.kl.init_coef", "0"), batch, monkeypatch)
        experiences = rollouts.make(made, batch)
        for experience in experiences:
            known = {names.GROUPS_CORRECT, names.GROUPS_ACCURACY} & set(experience.info)
            assert len(known) == (2 if surrogate == "htpo" else 0)
            for name, rows in ((names.GROUPS_CORRECT, correct), (names.GROUPS_ACCURACY, accuracy)):
                torch.testing.assert_close(experience.info.get(name, rows[experience.index]), rows[experience.index])


def test_metrics_of_a_batch_computed_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [1, 0, 1]], dtype=torch.bool)
    batch = Rollout(
        mask=mask,
        outcome=torch.tensor([1.0, 0.0, 0.5, 0.25]),
        group_ids=torch.tensor([0, 0, 1, 1]),
        entropy=torch.tensor([[1.0, 3.0, 9.0], [2.0, 9.0, 9.0], [1.0, 2.0, 3.0], [4.0, 9.0, 4.0]]),
        log_probs=torch.zeros(4, 3),
        reference=torch.zeros(4, 3),
        values=torch.zeros(4, 3),
        truncated=torch.zeros(4, dtype=torch.bool),
    )
    args = arguments("--algo.advantage.estimator", "gtpo", "--rollout.micro_batch_size", "2", samples=2)
    made, experiences = make(args, batch, monkeypatch)
    on_tokens = advantages(experiences, batch)[mask]
    # In group 0, row 0 alone is O+ and row 1 alone O-; rows 2 and 3 are O-: 1/H against its mean at each position.
    shares = torch.tensor([1, 1, 1, 1 / 0.625, 0.5 / 0.375, 1, 0.25 / 0.625, 0.25 / 0.375])
    expected = {
        names.REWARD_MEAN: 1.75 / 4,
        names.REWARD_MEAN_AT_G: 1.75 / 4,
        names.REWARD_BEST_AT_G: 0.75,
        names.GROUPS_UNIFORM: 1,
        names.GROUPS_TOTAL: 2,
        names.RESPONSE_LENGTH_MEAN: 2,
        names.ADVANTAGE_MEAN: on_tokens.mean().item(),
        names.ADVANTAGE_MAX: on_tokens.max().item(),
        names.ENTROPY_ALL: 20 / 8,
        names.ENTROPY_POSITIVE: 2,
        names.ENTROPY_NEGATIVE: 16 / 6,
        names.SHARES_STD: shares.std().item(),
    }
    assert made.metrics == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_a_row_without_a_token_has_finite_metrics(estimator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own agent may return such a row; upstream's means over its tokens are NaN."""
    batch = rollout()
    args = arguments("--algo.advantage.estimator", estimator, "--algo.kl.init_coef", "0.1")
    made = maker(ExperienceMaker, args, batch, monkeypatch, 0.1)
    rows = batch.rows()
    rows[1].mask[:] = False
    for experience in made.make(rows):
        for name in ("kl", "logprobs_diff", "return"):
            assert experience.info[name].isfinite().all(), name


def test_metrics_do_not_depend_on_how_micro_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = rollout(seed=19)
    chosen = ("--algo.advantage.estimator", "gtpo")
    results = [make(arguments(*chosen, *layout), batch, monkeypatch)[0].metrics for layout in LAYOUTS.values()]
    assert results[1] == pytest.approx(results[0], rel=1e-5, abs=1e-6)
    assert results[2] == pytest.approx(results[0], rel=1e-5, abs=1e-6)


def test_a_prompts_routes_are_its_first_rows() -> None:
    """So that the prompt can be computed once; a response's own stay, and so does a row without any."""
    tokens, mask = np.array([4, 5, 6, 7]), np.array([False, False, True, True])
    routes = [np.full((4, 2, 1), number, np.uint8) for number in range(3)]
    rows = [Row("", None, 0, tokens, mask, None, 1.0, 1.0, routes=each) for each in (*routes[:2], None)]
    rows.append(Row("", None, 1, tokens + 1, mask, None, 1.0, 1.0, routes=routes[2]))
    share_routes(rows)
    found = [None if row.routes is None else row.routes[:, 0, 0].tolist() for row in rows]
    assert found == [[0] * 4, [0, 0, 1, 1], None, [2] * 4]
