r"""OpenRLHF reward function for mathematics: `--reward.remote_url .../math_verify_reward.py`.

The reward is 1 if the response's last \boxed{...} (without one: its last formula or number) equals the label
mathematically, according to Math-Verify, else 0. Labels are answers in LaTeX or plain text, such as `cli.prepare math`
writes. OpenRLHF loads this file by its path and calls `reward_func` from threads, for one response at a time.

Math-Verify stops a runaway simplification with SIGALRM, which only works in a main thread
(https://github.com/huggingface/Math-Verify/issues/55). So the main thread of a child process makes each judgment
(`python3 -m` this module: a JSON line in, a JSON line out). The child ends with its parent. If even the alarm does not
stop it, it is killed and replaced.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from openrlhf_gtpo.tasks.responses import response_and_label

SECONDS_PER_STEP = 5  # Math-Verify's own limit for each extraction, and for each comparison
SECONDS_IN_ALL = 60.0
TINY = 1e-3

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # skips escaped braces
WITHOUT_BRACES = re.compile(r"[-+]?(?:\d|\\[a-zA-Z{])(?:(?!\\[\])])[^\s$])*")
ALONE = re.compile(r"\\boxed\{|\$[^$]+\$$")  # a response that is one formula
MONEY = re.compile(r"(?<!\\)\\\$")  # an escaped dollar sign, for money
SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)e([-+]?\d+)(?![\w.])")
BASE = re.compile(r"[^_]*\d_\{?(\d+)\W*$")  # the base of an answer such as 101_2, which Math-Verify drops


@dataclass(frozen=True)
class Grade:
    """The judgment of a response: whether it is correct, has an answer, and took too long to judge."""

    correct: bool
    answered: bool
    timed_out: bool = False


def reward_func(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> dict[str, Any]:
    """Score one response.

    Args:
        queries: one text, prompt and response, decoded with special tokens.
        prompts: the prompt's text; what follows it in the query is the response.
        labels: the answer.

    Returns:
        `rewards` and `scores`, 0.0 or 1.0, and `extra_logs` with `no_answer` (1.0 if the response has no answer) and
        `grading_timed_out` (1.0 if judging took too long).

    Raises:
        ValueError: not exactly one response, or a label that is not a mathematical expression.
    """
    response, answer = response_and_label(queries, prompts, labels)
    grade = _GRADERS.grade(response, str(answer))
    score = float(grade.correct)
    logs = {"no_answer": float(not grade.answered), "grading_timed_out": float(grade.timed_out)}
    return {"rewards": score, "scores": score, "extra_logs": logs}


def answer_of(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[str]) -> str | None:
    """Return one response's box as text, for majority voting; None without one. Same arguments as `reward_func`."""
    answer = final_answer(response_and_label(queries, prompts, labels)[0])
    return answer if answer.startswith("\\boxed{") else None


class GraderPool:
    """Judges responses for any number of threads, in at most ``size`` child processes, which start when needed."""

    def __init__(self, size: int | None = None, seconds: float = SECONDS_IN_ALL) -> None:
        self._free: queue.LifoQueue[subprocess.Popen[str] | None] = queue.LifoQueue()
        self._seconds = seconds
        for _ in range(size or max(1, min(4, os.cpu_count() or 1))):
            self._free.put(None)

    def grade(self, response: str, answer: str) -> Grade:
        """Judge whether the final answer of ``response`` equals ``answer``.

        Raises:
            ValueError: ``answer`` is not a mathematical expression.
            RuntimeError: the child process died, for example for lack of memory.
        """
        child = self._free.get()
        try:
            if child is None or child.poll() is not None:
                command = [sys.executable, "-m", "openrlhf_gtpo.tasks.math_verify_reward"]
                child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            line = _ask(child, json.dumps({"response": response, "answer": answer}), self._seconds)
        finally:
            self._free.put(child)
        if line is None:
            return Grade(correct=False, answered=True, timed_out=True)
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(reply["error"])
        return Grade(**reply)


_GRADERS = GraderPool()


def _ask(child: subprocess.Popen[str], question: str, seconds: float) -> str | None:
    """Return the child's reply; None if it was too slow and was killed."""
    assert child.stdin is not None and child.stdout is not None
    too_late = threading.Event()

    def end() -> None:
        too_late.set()
        child.kill()

    limit = threading.Timer(seconds, end)
    limit.start()
    try:
        child.stdin.write(question + "\n")
        child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        limit.cancel()
    if too_late.is_set():
        child.wait()  # even if it has just replied: it must not be used again
        return None
    if line:
        return line
    raise RuntimeError(f"The process that judges mathematical answers ended with status {child.wait()}.")


def judge(response: str, answer: str) -> Grade:
    """Judge `final_answer(response)` with Math-Verify in this thread, which must be its process's main thread.

    Raises:
        ValueError: ``answer`` is not a mathematical expression.
    """
    from math_verify import verify

    gold = parse_answer(answer)
    if not gold:
        raise ValueError(
            f"the answer {answer!r:.80} is not a mathematical expression; `python3 -m openrlhf_gtpo.cli.prepare math` "
            "leaves such rows out"
        )
    final = final_answer(response)
    answers = _parse(final)
    bases = {base[1] for text in (answer, final) if (base := BASE.match(text))}
    pairs = ((expected, given) for expected in gold for given in answers)
    correct = any(verify(*pair, timeout_seconds=SECONDS_PER_STEP) and not _tiny_and_apart(*pair) for pair in pairs)
    return Grade(correct=correct and len(bases) < 2, answered=bool(answers))


def _tiny_and_apart(expected: Any, given: Any) -> bool:
    """True if two numbers below 0.001 differ by more than a thousandth of the larger. Math-Verify misses this, because
    it compares six absolute decimals."""
    if expected == given or not all(getattr(answer, "is_number", False) for answer in (expected, given)):
        return False
    try:
        first, second = expected.doit().evalf(), given.doit().evalf()
        largest = max(abs(first), abs(second))
        return bool(largest < TINY and abs(first - second) > TINY * largest)
    except Exception:  # values without an order, such as NaN, and any error of sympy
        return False


def final_answer(response: str) -> str:
    r"""Extract the part of a response for Math-Verify: its last \boxed{...} or \fbox{...}, or else the whole text.

    Only the last box counts: `x=\boxed{1}, y=\boxed{2}` answers 2. An answer of several parts goes into one box.
    (Math-Verify itself would read nearby boxes as a set.) An empty box (the instruction quoted) or one that is never
    closed (a truncated response, perhaps in the middle of a number) is skipped, so the one before it counts.
    `\boxed 4` without braces is a box if a number or command follows.

    In a text without a box, Math-Verify reads the last formula or number. Formulas joined only by "and", "or" or a
    comma are one set. The word "answer" is removed, because Math-Verify prefers the text after it to the last formula.
    So is `\$`, because Math-Verify reads no number after it.
    """
    for box in reversed(list(BOX.finditer(response))):
        content, end = _box_content(response, box.end())
        if content:
            return f"\\boxed{{{content}}}"
        response = response[: box.start()] + response[end:]
    return re.sub("(?i)answer", "", MONEY.sub("", response))


def _box_content(text: str, start: int) -> tuple[str, int]:
    """The content of the box whose argument begins at `start` ("" if there is none), and where the box ends."""
    if text[start : start + 1] != "{":
        bare = WITHOUT_BRACES.match(text, start)
        return (bare[0].rstrip(".,;:"), bare.end()) if bare else ("", start)
    depth = 0
    for brace in BRACE.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth == 0:
            return text[start + 1 : brace.start()].strip().rstrip("."), brace.end()
    return "", len(text)


def parse_answer(answer: str) -> list[Any]:
    """Parse a data set's answer, LaTeX or plain, with Math-Verify; empty if it is not a mathematical expression."""
    text = MONEY.sub("", answer).strip()
    boxed = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    return _parse(boxed) or _parse(text)


def _parse(text: str) -> list[Any]:
    r"""Parse with Math-Verify. A lone formula with a number like 6.8e-5 (to it, 6.8 e - 5) gets both readings.

    To Math-Verify 10\,000 is 10 times 0, and U+2212 is a minus only in formulas. A blank or ~ separates thousands only
    in a lone formula, where 3 141 is one number: a list has commas.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    blank = r"|[\s~]" if ALONE.match(text) else ""
    # Not after a decimal point, nor in 10^3\,000 or \frac12\,345.
    thousands = rf"(?<![\w.^])[1-9]\d{{0,2}}(?:(?:\\[,:; ]{blank})\d{{3}})+(?!\d)"
    text = re.sub(thousands, lambda number: re.sub(r"\D", "", number[0]), text.replace("\N{MINUS SIGN}", "-"))
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    readings = [text]
    if ALONE.match(text) and SCIENTIFIC.search(text):
        readings.insert(0, SCIENTIFIC.sub(r"\1\\times 10^{\2}", text))
    parsed = (
        parse(reading, targets, fallback_mode="no_fallback", parsing_timeout=SECONDS_PER_STEP) for reading in readings
    )
    return [answer for answers in parsed for answer in answers]


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")  # keeps libraries' output away from the replies
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply: dict[str, Any] = asdict(judge(**json.loads(line)))
        except ValueError as error:
            reply = {"error": str(error)}
        channel.write(json.dumps(reply) + "\n")
        channel.flush()
