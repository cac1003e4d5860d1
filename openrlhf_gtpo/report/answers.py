"""What several answers to each question say of a model: mean@k, pass@k, best@k and majority@k."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any


def pass_at_k(correct: int, answers: int, k: int) -> float:
    """The chance that of ``k`` answers, drawn from ``answers`` without putting back, one at least is correct.

    1 - C(n - c, k) / C(n, k), the unbiased estimate of arXiv 2107.03374, Eq. 1.

    Raises:
        ValueError: not 0 <= correct <= answers, or not 1 <= k <= answers.
    """
    if not 0 <= correct <= answers:
        raise ValueError(f"Expected 0 <= correct <= {answers} answers, got {correct}.")
    if not 1 <= k <= answers:
        raise ValueError(f"Expected 1 <= k <= {answers} answers, got {k}.")
    return 1 - math.comb(answers - correct, k) / math.comb(answers, k)


def best_of(scores: Sequence[float], k: int) -> float:
    """The mean best score of ``k`` answers, over all draws from ``scores`` without putting back."""
    ranked = enumerate(sorted(scores))
    return sum(math.comb(place, k - 1) * score for place, score in ranked) / math.comb(len(scores), k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is correct; of several as frequent, the share that is.

    Args:
        answers: as text; None for a response without one, which has no vote. Without any vote it is 0.
        correct: of each answer.
    """
    votes: dict[str, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, correct, strict=True):
        if answer is not None:
            votes[answer].append(right)
    most = max(map(len, votes.values()), default=0)
    winners = [fmean(rights) for rights in votes.values() if len(rights) == most]
    return fmean(winners) if winners else 0.0


def per_question(questions: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """What the answers to each question say.

    Args:
        questions: ``scores``, ``lengths`` (tokens), ``cut_off``, and ``entropies`` (nats) and ``answers`` or None, a
            list of k each; an answer is correct where its score is at least 1.

    Returns:
        of every question: ``mean@k`` of scores; ``pass@j`` for j = 1, 2, 4, … and k; ``best@k`` score; ``majority@k``
        where every question has answers; ``length``; ``cut_off``, a share; ``entropy`` where every question has it.
    """
    found: dict[str, list[float]] = defaultdict(list)
    for question in questions:
        scores = question["scores"]
        k, correct = len(scores), [score >= 1 for score in scores]
        found[f"mean@{k}"].append(fmean(scores))
        for j in sorted({2**power for power in range(k.bit_length())} | {k}):
            found[f"pass@{j}"].append(pass_at_k(sum(correct), k, j))
        found[f"best@{k}"].append(max(scores))
        if question["answers"] is not None:
            found[f"majority@{k}"].append(majority(question["answers"], correct))
        found["length"].append(fmean(question["lengths"]))
        found["cut_off"].append(fmean(question["cut_off"]))
        if question.get("entropies"):  # which files of before they were there lack
            found["entropy"].append(fmean(question["entropies"]))
    return {name: values for name, values in found.items() if len(values) == len(questions)}


def summarize(found: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float | None]]:
    """Each number's mean over questions and its standard error (None for one question)."""
    return {
        name: (fmean(values), stdev(values) / len(values) ** 0.5 if len(values) > 1 else None)
        for name, values in found.items()
    }


def table(summaries: Mapping[str, Mapping[str, tuple[float, float | None]]]) -> str:
    """A markdown table, a row for each data set, of means ± standard errors, where there are any."""

    def cell(mean: float, error: float | None) -> str:
        return f"{mean:.3f}" if error is None else f"{mean:.3f} ± {error:.3f}"

    columns = list(dict.fromkeys(name for summary in summaries.values() for name in summary))
    lines = ["| data set | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for data, summary in summaries.items():
        cells = [cell(*summary[name]) if name in summary else "" for name in columns]
        lines.append(f"| {data} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
