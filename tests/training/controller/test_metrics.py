"""The warnings of a step that teaches nothing, and the statistics of an evaluation."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_trainer import compute_eval_metrics

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.controller.metrics import (
    eval_metrics,
    held_out_statistics,
    outcomes_line,
    sources_of,
    step_warnings,
)
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.rows import Row
from tests.support.rollouts import arguments

SHAPED = torch.tensor([0.0, 0.25, 0.5, 1.0])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["gtpo"],
            "Rewards are 0.0 to 1.0, 0.438 on average; 1 of 4 reach --algo.gtpo.success_threshold 1 and count as "
            "successes, the others as failures, also 2 between; lower the threshold if those are right.",
        ),
        (
            ["grpo_s", "--algo.grpo_s.success_threshold", "0.2"],
            "Rewards are 0.0 to 1.0, 0.438 on average; 3 of 4 reach --algo.grpo_s.success_threshold 0.2 and count as "
            "successes, the others as failures.",
        ),
        (["group_norm"], None),  # has no threshold
    ],
)
def test_the_first_rollout_says_how_many_succeed(flags: list[str], line: str | None) -> None:
    assert outcomes_line(SHAPED, entropy_credit(arguments("--algo.advantage.estimator", *flags))) == line


LEARNS = {
    names.GROUPS_UNIFORM: 15.0,
    names.GROUPS_TOTAL: 16.0,
    names.REWARD_MEAN: 0.25,
    "group_reward_std": 0.1,
    "rollout/truncated_rate": 0.85,
    "rollout/num_samples": 64.0,
}
ALL_FAIL = {names.GROUPS_UNIFORM: 16.0}  # with partial credit: rewards differ
EQUAL = ALL_FAIL | {"group_reward_std": 0.0}
OUTCOME = torch.tensor([0.0, 1.0, 0.25] * 16)


def warnings(estimator: str, status: dict[str, float], *flags: str, outcome: torch.Tensor = OUTCOME) -> str:
    args = arguments("--algo.advantage.estimator", estimator, *flags)
    return " ".join(step_warnings(LEARNS | status, outcome, args, entropy_credit(args)).values())


@pytest.mark.parametrize(
    ("estimator", "status", "flags", "sentence"),
    [
        ("gtpo", {}, [], None),
        ("group_norm", {}, [], None),
        ("group_norm", ALL_FAIL, [], None),
        ("group_norm", {"rollout/truncated_rate": 1.0, "group_reward_std": math.nan}, [], "64 of 64 responses"),
        ("reinforce", EQUAL, [], None),  # compares no rewards within a group
        ("gtpo", EQUAL, ["--algo.gtpo.shape_uniform_groups"], None),
        (
            "gtpo",
            ALL_FAIL,
            [],
            "in each of the 16 groups the 4 responses all succeed or all fail (--algo.gtpo.success_threshold 1), with "
            "a mean reward of 0.250, so nothing is learned; check the reward, or give --rollout.n_samples_per_prompt "
            "more than 4.",
        ),
        ("grpo_s", EQUAL, ["--algo.grpo_s.success_threshold", "0.5"], "(--algo.grpo_s.success_threshold 0.5)"),
        ("forking_tokens", ALL_FAIL, [], None),
        ("forking_tokens", EQUAL, [], "in each of the 16 groups the 4 rewards are equal, with a mean reward of 0.250"),
        ("rloo", EQUAL, [], "in each of the 16 groups the 4 rewards are equal, with a mean reward of 0.250"),
        (
            "gtpo",
            {"rollout/truncated_rate": 0.90625},
            ["--rollout.max_new_tokens", "32"],
            "58 of 64 responses were cut off at --rollout.max_new_tokens 32 before their end; give it more.",
        ),
        (
            "gtpo",
            {"rollout/truncated_rate": 0.95},
            ["--rollout.max_new_tokens", "32", "--data.max_len", "512", "--train.agent_func_path", "a.py"],
            "61 of 64 responses were cut off at --rollout.max_new_tokens 32 in a turn, or --data.max_len 512 in all,",
        ),
        ("gtpo", {"rollout/truncated_rate": 0.95}, ["--data.max_len", "512"], "61 of 64 responses were cut off at "
         "--data.max_len 512"),
    ],
)  # fmt: skip
def test_a_step_that_teaches_nothing_is_named_with_the_flag_that_helps(
    estimator: str, status: dict[str, float], flags: list[str], sentence: str | None
) -> None:
    found = warnings(estimator, status, *flags)
    assert found == "" if sentence is None else sentence in found


@pytest.mark.parametrize(
    ("estimator", "flags", "rewards", "sentence"),
    [
        ("gtpo", [], [0.1, 0.9, 0.5], "0 of 96 responses reach 1.0 (rewards 0.1 to 0.9), so none counts as a success; "
         "lower --algo.gtpo.success_threshold, or check the reward."),
        ("grpo_s", ["--algo.grpo_s.success_threshold", "0.5", "--algo.grpo_s.shape_uniform_groups"],
         [0.0, 0.49999997], "0 of 64 responses reach 0.5 (rewards 0.0 to 0.49999997)"),
        ("gtpo", [], [0.1, 0.7 + 0.2 + 0.1], "in each of the 16 groups"),  # a success
        ("gtpo", [], [0.2, 0.2], "in each of the 16 groups"),  # no threshold would part them
        ("group_norm", [], [0.1, 0.9], None),
        ("forking_tokens", [], [0.1, 0.9], None),  # only its metrics ask for successes
    ],
)  # fmt: skip
def test_rewards_that_never_reach_the_threshold_are_named_with_it(
    estimator: str, flags: list[str], rewards: list[float], sentence: str | None
) -> None:
    found = warnings(estimator, ALL_FAIL, *flags, outcome=torch.tensor(rewards * 32))
    assert found == "" if sentence is None else sentence in found


def answered(questions: Sequence[Sequence[float]], tokens: int = 3) -> list[Row]:
    """Rows with the rewards of each question's responses, the first of which is cut off."""
    mask = np.array([False, True, False, True])[: tokens + 1]
    return [
        Row("x", None, number, np.arange(len(mask)), mask, None, reward, None, truncated=place == 0)
        for number, rewards in enumerate(questions)
        for place, reward in enumerate(rewards)
    ]


def test_the_standard_error_of_held_out_reward_is_over_questions() -> None:
    rows = answered([(0.0, 1.0), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0), (math.nan, 1.0), (0.0, 1.0)])
    # The means of x's questions are 0.5, 1 and 0, with a standard deviation of 0.5; y has one question.
    expected = {"eval_x_pass1_stderr": 0.5 / math.sqrt(3), "eval_z_pass1_stderr": math.nan}
    assert held_out_statistics(rows, list("xxxyzz"), 2) == pytest.approx(expected, nan_ok=True)


def test_a_question_of_two_data_sets_counts_in_both() -> None:
    """A data loader gives two rows at a time here; both sets have the question "a"."""
    sources = sources_of([(["x", "x"], ["a", "b"], [0, 0], None), (["y"], ["a"], [0], None)])
    expected = {"eval_x_pass2": 0.5, "eval_x_pass1": 0.25, "eval_y_pass2": 1.0, "eval_y_pass1": 1.0}
    for name in ("eval_x_", "eval_y_", "eval_"):
        expected |= {f"{name}response_length_mean": 2.0, f"{name}truncated_rate": 0.5}
    logs = eval_metrics(answered([(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)]), sources, 2)
    assert logs == expected | {"eval_num_samples": 6}


def test_the_best_of_16_is_that_of_all_draws_from_a_questions_responses() -> None:
    rows = answered([[1.0, 0.5] + 15 * [0.0]])
    # Each draw leaves out one of 17: the best in one draw, another one in the other 16.
    assert held_out_statistics(rows, ["x"], 17) == {"eval_x_pass16": pytest.approx((0.5 + 16 * 1.0) / 17)}
    assert held_out_statistics(rows[:16], ["x"], 16) == {}  # upstream reports this one


def test_an_evaluation_has_what_upstream_says_of_it() -> None:
    """Questions of one data set each, whose texts differ."""
    rows = answered([(0.5, 0.0, 1.0), (0.25, 0.0, 0.0), (1.0, 1.0, 1.0)])
    for row in rows:
        row.prompt = f"question {row.number}"
    loader = [(["x", "y"], ["question 0", "question 1"], [0, 0], None), (["x"], ["question 2"], [0], None)]
    upstreams = compute_eval_metrics(loader, [row.experience(max_len=4) for row in rows], 3)
    assert eval_metrics(rows, sources_of(loader), 3) == pytest.approx(upstreams)
