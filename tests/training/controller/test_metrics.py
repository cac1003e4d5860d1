"""The warnings of a step that teaches nothing, and the statistics of an evaluation."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from openrlhf.trainer.ppo_trainer import compute_eval_metrics

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.controller.metrics import (
    eval_metrics,
    held_out_statistics,
    sources_of,
)
from openrlhf_gtpo.training.rows import Row

ALL_FAIL = {names.GROUPS_UNIFORM: 16.0}  # with partial credit: rewards differ


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
