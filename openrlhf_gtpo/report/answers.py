"""A model's scores over several answers to each question: mean@k, pass@k, best@k and majority@k."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from openrlhf_gtpo.report.metrics import decimals


def best_of(scores: Sequence[float], k: int) -> float:
    """Compute the expected best of ``k`` scores drawn from ``scores`` without replacement.

    For n scores, 1 for c correct answers and 0 otherwise, this is pass@k, 1 - C(n - c, k) / C(n, k), the unbiased
    estimate of arXiv 2107.03374, Eq. 1.
    """
    ranked = enumerate(sorted(scores))
    return sum(math.comb(place, k - 1) * score for place, score in ranked) / math.comb(len(scores), k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return 1 if the most frequent answer is correct, else 0; of several equally frequent, the share that is correct.

    Args:
        answers: as text; None for a response without an answer, which does not vote. Without any vote the result is 0.
        correct: whether each answer is correct.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(right)
    most = max(map(len, votes.values()), default=0)
    winners = [fmean(rights) for rights in votes.values() if len(rights) == most]
    return fmean(winners) if winners else 0.0


def per_question(questions: Sequence[Mapping[str, Any]], correct: Sequence[Sequence[bool]]) -> dict[str, list[float]]:
    """Compute the scores of each question.

    Args:
        questions: each has a list of k for ``scores``, ``lengths`` (tokens), ``cut_off``, and a list or None for
            ``entropies`` (nats) and ``answers``.
        correct: whether each answer is correct, for each question.

    Returns:
        A value for every question: ``mean@k`` of scores; ``pass@j`` for j = 1, 2, 4, … and k; ``best@k`` score;
        ``majority@k`` if all questions have answers; ``length``; ``cut_off``, a share; ``entropy`` if all have it.
    """
    by_measure: dict[str, list[float]] = defaultdict(list)
    for question, right in zip(questions, correct, strict=True):
        scores = question["scores"]
        k = len(scores)
        by_measure[f"mean@{k}"].append(fmean(scores))
        for j in sorted({2**power for power in range(k.bit_length())} | {k}):
            by_measure[f"pass@{j}"].append(best_of(right, j))
        by_measure[f"best@{k}"].append(max(scores))
        if question["answers"] is not None:
            by_measure[f"majority@{k}"].append(majority(question["answers"], right))
        by_measure["length"].append(fmean(question["lengths"]))
        by_measure["cut_off"].append(fmean(question["cut_off"]))
        if question.get("entropies"):  # older files lack it
            by_measure["entropy"].append(fmean(question["entropies"]))
    return {name: values for name, values in by_measure.items() if len(values) == len(questions)}


def summarize(by_measure: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float | None]]:
    """Compute each score's mean over questions and its standard error (None for one question)."""
    return {
        name: (fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)
        for name, values in by_measure.items()
    }


def table(summaries: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> str:
    """Write a markdown table with a row for each data set: means, ± standard errors where known."""

    def cell(mean: float, error: float | None) -> str:
        return decimals(mean) + ("" if error is None else f" ± {decimals(error)}")

    columns = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    lines = ["| data set | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for data, summary in summaries.items():
        cells = [cell(*summary[name]) if name in summary else "" for name in columns]
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
