"""The exceptions that end a run on purpose, and an error for settings that cannot work, raised by rooms that know
nothing about command lines. A command line prints only their message, without a stack trace.
"""

import difflib
import re
from collections.abc import Callable, Iterable

_SETTING = r"\$([a-z]\w*)"

STOPPED_STATUS = 75  # exit status after a stop on request; sysexits.h, EX_TEMPFAIL: nothing is wrong, try again later


class UsageError(ValueError):
    """The user asked for something that cannot work. Raised before any engine starts."""


class TrainingStopped(RuntimeError):
    """Training cannot continue: it lacks data or must not learn from them (a NaN, a failed reward; raised before
    weights change), a checkpoint cannot be written, or more engines were lost than the run allows."""


class Restartable(TrainingStopped):
    """Training stopped for a reason that may not recur, such as the death of a node or process. A supervised run
    (``--train.max_restarts``) resumes from its last checkpoint."""


class StoppedOnRequest(RuntimeError):
    """Training stopped on request, either before its first step or after a step whose checkpoint is written."""


def one_line(error: object) -> str:
    """Put the text of an error, or any other text, on one line; the error's type if it has no text."""
    return " ".join(str(error).split()) or type(error).__name__


def with_near_flag(message: str, known: Iterable[str]) -> str:
    """Return argparse's message. If it is about an unknown flag, append the most similar known flag."""
    if not message.startswith("unrecognized"):
        return message
    unknown = next((word.partition("=")[0] for word in message.split() if word.startswith("--")), "")
    near = difflib.get_close_matches(unknown, list(known), 1)
    return f"{message}; did you mean {near[0]}?" if near else message


def last_error(error: object, most: int) -> str:
    """Put the text of an error on one line, cut after ``most`` characters. Of a traceback, as in Ray's errors, only
    the end counts: everything from the last unindented line that follows an indented one. The list of memory users
    that Ray's memory monitor appends is kept (2.55, raylet)."""
    lines = str(error).strip().splitlines()
    ends = [n for n in range(1, len(lines)) if lines[n - 1][:1].isspace() and not lines[n][:1].isspace() and lines[n]]
    words = one_line("\n".join(lines[ends[-1] :])) if ends else one_line(error)
    said, mark, users = words.partition("Top 10 memory users: ")
    return f"{said:.{most}}{mark}{users:.2000}"


class SettingError(ValueError):
    """Settings that cannot work, alone or together. A command line prints the sentence with its own flag names.

    Args:
        sentence: field, value and rule, with ``$name`` for the setting ``name``: "$tensor_model_parallel_size 3 does
            not divide …". ``str(error)`` has the bare name.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(re.sub(_SETTING, r"\1", sentence))
        self.sentence = sentence

    def with_flags(self, flag: Callable[[str], str]) -> str:
        """Return the sentence with each ``$name`` replaced by ``flag(name)``."""
        return re.sub(_SETTING, lambda match: flag(match[1]), self.sentence)
