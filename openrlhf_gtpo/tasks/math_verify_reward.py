r"""OpenRLHF reward function for mathematics: `--reward.remote_url .../math_verify_reward.py`.

1 where the response's last \boxed{...} (without one: its last formula or number) equals the label mathematically, as
Math-Verify sees it, else 0. Labels are answers in LaTeX or plain text, such as those that `cli.prepare math` writes.
OpenRLHF loads this file by its path and calls `reward_func` from threads, for one response at a time.
"""

from collections.abc import Sequence
from typing import Any

from openrlhf_gtpo.tasks.math_grading import GraderPool
from openrlhf_gtpo.tasks.responses import response_text

_GRADERS = GraderPool()


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Score one response.

    Args:
        queries: one text, prompt and response, as decoded with its special tokens.
        prompts: the prompt's text; what follows it in the query is the response.
        labels: the answer.

    Returns:
        `rewards` and `scores`, both 0.0 or 1.0, and `extra_logs` with `no_answer` and `grading_timed_out`, 1.0 where no
        answer was found in the response and where judging it was given up.

    Raises:
        ValueError: not exactly one response, or a label that is not a mathematical expression.
    """
    if not len(queries) == len(prompts) == len(labels) == 1:
        raise ValueError(
            f"one response at a time, got {len(queries)} queries, {len(prompts)} prompts, {len(labels)} labels"
        )
    grade = _GRADERS.grade(response_text(queries[0], prompts[0]), str(labels[0]))
    score = float(grade.correct)
    logs = {"no_answer": float(not grade.answered), "grading_timed_out": float(grade.timed_out)}
    return {"rewards": score, "scores": score, "extra_logs": logs}
