"""Effects and intervals: against known cases, and against draws whose effect is known."""

import math
import statistics

import numpy as np
import pytest
from scipy import stats

from openrlhf_gtpo.tools.experiment.comparison import p_among_all, paired_difference
from tests.support.simulated import coverage


def test_one_number_a_seed_is_students_paired_interval() -> None:
    values = [0.1, 0.3, 0.2, 0.6, -0.1]
    found = paired_difference(np.array(values)[:, None])
    half = 2.7764451 * statistics.stdev(values) / 5**0.5  # t at 0.975 with 4 degrees of freedom
    assert found.effect == pytest.approx(statistics.fmean(values))
    assert (found.low, found.high) == pytest.approx((found.effect - half, found.effect + half), rel=1e-6)
    assert (found.seeds, found.prompts) == (5, 1)


def test_where_seeds_do_not_differ_questions_decide() -> None:
    """Without an effect of seeds or noise, the interval is Student's over questions, however few the seeds."""
    by_question = np.random.default_rng(0).normal(0.2, 0.1, 20)
    found = paired_difference(np.tile(by_question, (3, 1)))
    half = 2.0930241 * by_question.std(ddof=1) / 20**0.5  # t at 0.975 with 19 degrees of freedom
    assert (found.low, found.high) == pytest.approx((found.effect - half, found.effect + half), rel=1e-6)


def test_one_method_among_all_is_students_unpaired_test_and_more_methods_need_more() -> None:
    random = np.random.default_rng(0)
    baseline, method = random.normal(0, 1, 5), random.normal(1.5, 1, 5)
    (alone,) = p_among_all([method], baseline)
    assert alone == pytest.approx(stats.ttest_ind(method, baseline).pvalue, rel=0.05)
    found = p_among_all([method, *random.normal(0, 1, (9, 5))], baseline)
    assert len(found) == 10 and found[0] > alone
    assert p_among_all([np.full(3, 0.5), np.array([0.9, 0.8, 0.9])], np.array([0.4, 0.5, 0.6]))[0] > 0.99


def test_equal_methods_differ_among_all_in_one_study_of_twenty() -> None:
    random = np.random.default_rng(0)
    smallest = [min(p_among_all(list(random.normal(0, 1, (4, 3))), random.normal(0, 1, 3))) for _ in range(400)]
    assert 0.03 <= np.mean(np.array(smallest) < 0.05) <= 0.07


def test_no_differences_have_an_interval_of_no_width_and_one_seed_has_none() -> None:
    same = paired_difference(np.zeros((3, 10)))
    assert (same.effect, same.low, same.high, same.seen) == (0, 0, 0, 0)
    assert same.sentence("a", "b") == "a against b: no difference seen (+0.000; 3 seeds without a spread)."
    equal = paired_difference(np.array([0.3 - 0.2, 0.9 - 0.8])[:, None])  # as can happen by chance with few questions
    same_mean = "a against b: the same mean difference for every seed (+0.100; 2 seeds without a spread)."
    assert equal.sentence("a", "b") == same_mean
    one = paired_difference(np.array([[0.5, 0.7]]))
    assert one.effect == pytest.approx(0.6) and math.isnan(one.low) and math.isnan(one.seen)
    assert "1 seed cannot show" in one.sentence("a", "b")


def test_an_interval_without_0_does_not_show_it() -> None:
    found = paired_difference(np.array([0.0005, 0.0006, 0.0007])[:, None])
    assert found.sentence("a", "b") == "a is better than b (+0.00060, 95 % interval +0.00035 to +0.00085)."


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize(
    "scenario", ["noise alone", "mostly seeds", "seeds as questions", "mostly questions", "answers"]
)
def test_intervals_cover_the_true_effect(scenario: str, seeds: int) -> None:
    """In 93 to 97 % of the draws; benchmarks/studies/report_page.py makes more."""
    assert 0.93 <= coverage(scenario, seeds, 50, 1500) <= 0.97


def test_intervals_cover_less_where_differences_are_not_normal() -> None:
    """A limit of the method: evenly spread seeds that decide alone, and few questions of which one or two differ."""
    assert 0.90 <= coverage("answers", 3, 500, 1500) <= 0.94
    random = np.random.default_rng(0)
    covered = []
    for _ in range(1500):
        solved = random.random(30) < 0.06
        answers = random.binomial(32, [np.tile(0.7 * solved, (3, 1)), np.tile(0.2 * solved, (3, 1))]) / 32
        found = paired_difference(answers[0] - answers[1])
        covered.append(found.low <= 0.06 * 0.5 <= found.high)
    assert 0.80 <= np.mean(covered) <= 0.90


def test_an_effect_that_can_be_seen_is_seen_in_four_cases_of_five() -> None:
    """For 5 normal differences it is 1.682 standard deviations (any table of the power of Student's test)."""
    values = np.random.default_rng(0).standard_normal((4000, 5, 1))
    assert paired_difference(values[0]).seen == pytest.approx(1.682 * values[0].std(ddof=1), rel=1e-3)
    assert np.mean([paired_difference(value + 1.682).low > 0 for value in values]) == pytest.approx(0.8, abs=0.02)
