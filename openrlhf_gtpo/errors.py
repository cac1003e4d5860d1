"""The three ways in which a run ends on purpose; a command line prints only their message, without a stack trace. Also
the error that lower rooms, which know nothing of command lines, raise for settings that cannot work."""

import difflib
import re
from collections.abc import Callable, Iterable

_SETTING = r"\$([a-z]\w*)"

STOPPED_STATUS = 75  # exit status after a stop on request; sysexits.h, EX_TEMPFAIL: nothing is wrong, try again later


class UsageError(ValueError):
    """The user asked for something that cannot work. Raised before any engine starts."""


class TrainingStopped(RuntimeError):
    """Training cannot go on: it must not learn from its data (a NaN, a failed reward; raised before weights change),
    there are none, a checkpoint cannot be written, or more engines were lost than the run allows."""


class Restartable(TrainingStopped):
    """Training stopped for a reason that need not recur, such as the death of a node or process: a supervised run
    (``--train.max_restarts``) resumes from its last checkpoint."""


class StoppedOnRequest(RuntimeError):
    """Training was asked to stop, and did so before its first step, or after one whose checkpoint is written."""


def one_line(error: object) -> str:
    """The words of an error, or of any text, in one line; the type of an error that has none."""
    return " ".join(str(error).split()) or type(error).__name__


def with_near_flag(message: str, known: Iterable[str]) -> str:
    """argparse's message; on a flag that it does not know, with the known one that is most like it."""
    if not message.startswith("unrecognized"):
        return message
    unknown = next((word.partition("=")[0] for word in message.split() if word.startswith("--")), "")
    near = difflib.get_close_matches(unknown, list(known), 1)
    return f"{message}; did you mean {near[0]}?" if near else message


def last_error(error: object, most: int) -> str:
    """The words of an error in one line, cut after ``most`` characters; of one whose text is a traceback, as of Ray's,
    those at the traceback's end: from the last line on that is not indented and follows one that is. If Ray's memory
    monitor ended it, its list of who used the memory is whole (2.55, raylet)."""
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
        """The sentence with ``flag(name)`` in place of each ``$name``."""
        return re.sub(_SETTING, lambda match: flag(match[1]), self.sentence)
