"""OpenRLHF reward function with reasoning-gym's own scorer: `--reward.remote_url .../reasoning_gym_reward.py`.

OpenRLHF loads this file by its path and calls `reward_func` from a thread for one response at a time. Labels are the
`scorer_label` that `reasoning_gym_data.py` writes.
"""

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import reasoning_gym

from openrlhf_gtpo.tasks.responses import response_and_label

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")

_scorer = functools.cache(reasoning_gym.get_score_answer_fn)


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Score one response.

    Args:
        queries: one text, prompt and response, decoded with special tokens.
        prompts: the prompt's text; what follows it in the query is the response.
        labels: the row's JSON label: `{"task": name, "entry": {"answer": ..., "metadata": ...}}`.

    Returns:
        `rewards`, which training and evaluation use: the scorer's number in [0, 1], partial credit included; `scores`,
        which OpenRLHF's dynamic filtering reads as right or wrong: 1.0 if that number is 1, else 0.0; and `extra_logs`
        with `no_answer`, 1.0 if the response has no answer.

    Raises:
        ValueError: not exactly one response, or a label in another format.
    """
    response, text = response_and_label(queries, prompts, labels)
    try:
        label = json.loads(text)
        task, entry, expected = label["task"], label["entry"], str(label["entry"]["answer"])
    except (ValueError, TypeError, KeyError):
        raise ValueError(
            f"label {text!r:.80} was not written by `python3 -m openrlhf_gtpo.cli.prepare task`; pass "
            "--data.label_key scorer_label"
        ) from None
    answer = extract_answer(response, expected)
    reward = float(_scorer(task)(answer=answer, entry=entry)) if answer else 0.0
    return {"rewards": reward, "scores": float(reward >= 1), "extra_logs": {"no_answer": float(not answer)}}


def extract_answer(response: str, expected: str) -> str:
    """Extract the part of a response to score; "" if there is none.

    It is the text inside the last `<answer></answer>`. Without these tags it is the last number, if a number is
    expected, and otherwise the whole response. The number loses its plus sign and thousands separators, because many
    scorers compare texts. A minus sign (U+2212) becomes a hyphen.
    """
    response = response.replace("\N{MINUS SIGN}", "-")
    if tagged := TAGGED.findall(response):
        return tagged[-1].strip()
    if NUMBER.fullmatch(expected.strip()):
        text = re.sub(r"(?<=\d)[ \t]*[-+]", " ", response)  # an operator, not a sign
        numbers = NUMBER.findall(re.sub(r"(=[ \t]*[-+])[ \t]+", r"\1", text))
        return numbers[-1].lstrip("+").replace(",", "") if numbers else ""
    return response.strip()


def answer_of(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return the answer of one response, for majority voting; None if it has none. Same arguments as `reward_func`."""
    response, text = response_and_label(queries, prompts, labels)
    return extract_answer(response, str(json.loads(text)["entry"]["answer"])) or None
