"""Math-Verify's judgement of answers, in processes of its own.

Math-Verify stops a runaway simplification with SIGALRM, which works in a process's main thread only; rewards are asked
for from threads. So each judgement is made by the main thread of a child process (`python3 -m` this module: a JSON line
in, a JSON line out), which ends with its parent, and which is replaced where even the alarm does not stop it.
Knows math_verify only.
"""

import json
import os
import queue
import re
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass
from typing import IO, Any

SECONDS_PER_STEP = 5  # of Math-Verify's own limits: one for each extraction, one for each comparison
SECONDS_IN_ALL = 60.0

BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace
WITHOUT_BRACES = re.compile(r"[-+]?(?:\d|\\[a-zA-Z{])(?:(?!\\[\])])[^\s$])*")


@dataclass(frozen=True)
class Grade:
    """Whether a response is correct; whether an answer was found in it; whether judging it took too long."""

    correct: bool
    answered: bool
    timed_out: bool = False


class GraderPool:
    """Judges from any number of threads; child processes start when they are needed, at most ``size``."""

    def __init__(self, size: int | None = None, seconds: float = SECONDS_IN_ALL) -> None:
        self._free: queue.LifoQueue[_Grader | None] = queue.LifoQueue()
        self._seconds = seconds
        for _ in range(size or max(1, min(4, os.cpu_count() or 1))):
            self._free.put(None)

    def grade(self, response: str, answer: str) -> Grade:
        """Whether ``response`` ends in something equal to ``answer``.

        Raises:
            ValueError: ``answer`` is not a mathematical expression.
        """
        grader = self._free.get()
        try:
            if grader is None or not grader.alive:
                grader = _Grader()
            reply = grader.ask({"response": response, "answer": answer}, self._seconds)
        finally:
            self._free.put(grader)
        if reply is None:
            return Grade(correct=False, answered=True, timed_out=True)
        if "error" in reply:
            raise ValueError(reply["error"])
        return Grade(**reply)


class _Grader:
    def __init__(self) -> None:
        command = [sys.executable, "-m", "openrlhf_gtpo.tasks.math_grading"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: dict[str, str], seconds: float) -> dict[str, Any] | None:
        """The child's reply; None where it gave none in time, and the child is ended then.

        Raises:
            RuntimeError: the child ended by itself, such as for want of memory.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        too_late = threading.Event()

        def end() -> None:
            too_late.set()
            self._process.kill()

        limit = threading.Timer(seconds, end)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            limit.cancel()
        if line:
            return json.loads(line)
        status = self._process.wait()
        if too_late.is_set():
            return None
        raise RuntimeError(f"the process that judges mathematical answers ended with status {status}")


def judge(response: str, answer: str) -> Grade:
    r"""Math-Verify's judgement of `final_answer(response)`, in this thread, which must be its process's main one.

    Raises:
        ValueError: ``answer`` is not a mathematical expression.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    gold = parse_answer(answer)
    if not gold:
        raise ValueError(
            f"the answer {answer!r:.80} is not a mathematical expression; `python3 -m openrlhf_gtpo.cli.prepare math` "
            "leaves such rows out"
        )
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    found = parse(final_answer(response), targets, fallback_mode="no_fallback", parsing_timeout=SECONDS_PER_STEP)
    correct = bool(found) and verify(gold, found, timeout_seconds=SECONDS_PER_STEP)
    return Grade(correct=bool(correct), answered=bool(found))


def final_answer(response: str) -> str:
    r"""What of a response Math-Verify is to read: the last \boxed{...} or \fbox{...}, without one the whole text.

    Only the last box counts, whatever stands before or after it: `x=\boxed{1}, y=\boxed{2}` answers 2, and an answer of
    several parts goes into one box. Math-Verify itself would read boxes that are close together as a set. A box that is
    empty (the instruction quoted) or is never closed (a response that was cut off, perhaps in the middle of a number) is
    passed over, so that the one before it counts. `\boxed 4` without braces is a box where a number or command follows.

    Of a text without a box, Math-Verify reads the last formula or number; formulas that only "and", "or" or a comma
    joins are one set. The word "answer" is taken out, since Math-Verify prefers what follows it to what comes last.
    """
    for box in reversed(list(BOX.finditer(response))):
        content, end = _box_content(response, box.end())
        if content:
            return f"\\boxed{{{content}}}"
        response = response[: box.start()] + response[end:]
    return re.sub("(?i)answer", "", response)


def _box_content(text: str, start: int) -> tuple[str, int]:
    """What is in the box whose argument begins at `start`, "" where there is nothing, and where the box ends."""
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
    """What Math-Verify reads from a data set's answer, LaTeX or plain; empty where it is not a mathematical expression."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = answer.strip()
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    for form in (f"\\boxed{{{text}}}" if "\\boxed" not in text and "$" not in text else text, text):
        found = parse(form, targets, fallback_mode="no_fallback", parsing_timeout=SECONDS_PER_STEP)
        if found:
            return found
    return []


def serve(questions: IO[str], replies: IO[str]) -> None:
    """Answer JSON lines until there are no more."""
    for line in questions:
        question = json.loads(line)
        try:
            reply: dict[str, Any] = asdict(judge(question["response"], question["answer"]))
        except ValueError as error:
            reply = {"error": str(error)}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    channel = os.fdopen(os.dup(1), "w")  # whatever a library prints must not get between the replies
    os.dup2(2, 1)
    serve(sys.stdin, channel)
