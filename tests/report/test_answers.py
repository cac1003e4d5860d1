"""mean@k, pass@k, best@k and majority@k against counting by hand."""

import math
from itertools import combinations
from statistics import fmean, stdev

import pytest

from openrlhf_gtpo.report.answers import best_of, majority, per_question, summarize, table


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer(n: int) -> None:
    for correct in range(n + 1):
        right = [True] * correct + [False] * (n - correct)
        for k in range(1, n + 1):
            draws = [any(draw) for draw in combinations(right, k)]
            assert best_of(right, k) == pytest.approx(fmean(draws), abs=1e-15)


def test_the_best_of_k_is_a_mean_over_draws() -> None:
    scores = [0.25, 1.0, 0.0, 0.5, 0.5]
    for k in range(1, 6):
        assert best_of(scores, k) == pytest.approx(fmean(map(max, combinations(scores, k))), rel=1e-15)


def test_pass_at_k_stays_exact_for_many_answers() -> None:
    # 1 - prod (1 - k / i) over i = n - c + 1 … n, the closed form of arXiv 2107.03374
    product = math.prod(1 - 256 / i for i in range(1024 - 3 + 1, 1025))
    assert best_of([True] * 3 + [False] * 1021, 256) == pytest.approx(1 - product, rel=1e-12)


@pytest.mark.parametrize(
    ("answers", "correct", "expected"),
    [
        (["7", "7", "9"], [True, True, False], 1.0),
        (["7", "9", "9"], [True, False, False], 0.0),
        (["7", "9"], [True, False], 0.5),  # a tie
        (["7", None, None], [True, False, False], 1.0),  # a missing answer has no vote
        ([None, None], [False, False], 0.0),
    ],
)
def test_majority_is_the_most_frequent_answer(answers: list, correct: list, expected: float) -> None:
    assert majority(answers, correct) == expected


def test_a_summary_has_means_and_standard_errors_over_questions() -> None:
    questions = [
        {"scores": [1, 0, 0.2], "lengths": [4, 6, 8], "cut_off": [0, 0, 1], "answers": ["a", "b", "b"],
         "entropies": [0.25, 0.5, 0.75]},
        {"scores": [1, 1, 1], "lengths": [1, 1, 1], "cut_off": [0, 0, 0], "answers": ["c", "c", "c"],
         "entropies": [1.5, 1.5, 1.5]},
    ]  # fmt: skip
    correct = [[True, False, False], [True, True, True]]
    found = summarize(per_question(questions, correct))
    names = ["mean@3", "pass@1", "pass@2", "pass@3", "best@3", "majority@3", "length", "cut_off", "entropy"]
    assert list(found) == names and found["entropy"][0] == 1.0
    assert list(per_question([questions[0], questions[1] | {"entropies": None, "answers": None}], correct)) == [
        name for name in names if name not in ("majority@3", "entropy")  # only some questions have these
    ]
    assert found["mean@3"] == (pytest.approx(0.7), pytest.approx(stdev([0.4, 1]) / 2**0.5))
    assert found["pass@1"][0] == pytest.approx((1 / 3 + 1) / 2)
    assert found["pass@2"][0] == pytest.approx((2 / 3 + 1) / 2)
    assert (found["pass@3"][0], found["best@3"][0], found["majority@3"][0]) == (1, 1, 0.5)
    assert (found["length"][0], found["cut_off"][0]) == (3.5, pytest.approx(1 / 6))
    alone = summarize(per_question([questions[0] | {"answers": None}], correct[:1]))
    assert "majority@3" not in alone and alone["mean@3"][1] is None and "±" not in table({"x": alone})
    assert "| one | 0.700 ± 0.300 |" in table({"one": found}).replace("0.700 ± 0.300 | 0", "0.700 ± 0.300 |\n0")
    assert "| 0.99975 ± 0.00020 |" in table({"one": {"mean@3": (0.99975, 0.0002)}})
