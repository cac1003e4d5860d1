"""Differences between a method and its baseline whose true effect is known."""

import numpy as np

from openrlhf_gtpo.tools.experiment.comparison import paired_difference

EFFECT = 0.1
SCENARIOS = {  # standard deviations of seeds, of questions, and of what is left
    "noise alone": (0.0, 0.0, 0.3),
    "seeds alone": (0.05, 0.0, 0.0),
    "questions alone": (0.0, 0.3, 0.0),
    "questions and noise": (0.0, 0.2, 0.3),
    "mostly seeds": (0.05, 0.1, 0.1),
    "seeds as questions": (0.05, 0.3, 0.1),
    "mostly questions": (0.02, 0.3, 0.2),
}


def draw(random: np.random.Generator, scenario: str, seeds: int, questions: int) -> np.ndarray:
    """Draw (seeds, questions) with mean ``EFFECT``; "answers": both give 8 right or wrong ones to each question."""
    if scenario == "answers":
        by_seed, by_question = random.uniform(-0.05, 0.05, (seeds, 1)), random.uniform(-0.1, 0.1, questions)
        chance = random.uniform(0.25, 0.65, questions)
        answers = random.binomial(8, [chance + EFFECT + by_seed + by_question, chance + 0 * by_seed]) / 8
        return answers[0] - answers[1]
    by_seed, by_question, left = (
        deviation * random.standard_normal(shape)
        for deviation, shape in zip(SCENARIOS[scenario], ((seeds, 1), questions, (seeds, questions)), strict=True)
    )
    return EFFECT + by_seed + by_question + left


def coverage(scenario: str, seeds: int, questions: int, repetitions: int) -> float:
    """The share of repetitions whose interval holds the true effect."""
    random = np.random.default_rng(0)
    found = (paired_difference(draw(random, scenario, seeds, questions)) for _ in range(repetitions))
    return float(np.mean([difference.low <= EFFECT <= difference.high for difference in found]))
