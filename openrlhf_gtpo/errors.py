"""The three ways in which a run ends on purpose; a command line prints their message alone, without a stack trace. And
what lower rooms, which know no command line, raise for settings that cannot work."""

import re
from collections.abc import Callable

_SETTING = r"\$([a-z]\w*)"

STOPPED_STATUS = 75  # of a run that stopped on request: sysexits.h, EX_TEMPFAIL, nothing is wrong, try again later


class UsageError(ValueError):
    """The user asked for something that cannot work. Raised before any engine starts."""


class TrainingStopped(RuntimeError):
    """Training cannot go on: data that it must not learn from (a NaN, a failed reward; raised before weights change),
    a checkpoint that cannot be written."""


class Restartable(TrainingStopped):
    """Training stopped at what need not happen again, such as the death of a node or process: a supervised run
    (``--train.max_restarts``) goes on from its last checkpoint."""


class StoppedOnRequest(RuntimeError):
    """Training was asked to stop, and did so after a whole step, whose checkpoint is written."""


class SettingError(ValueError):
    """Settings that cannot work, alone or together. A command line prints it with its own flags.

    Args:
        sentence: field, value and rule, with ``$name`` for the setting ``name``: "$tensor_model_parallel_size 3 does
            not divide …". ``str(error)`` has the bare name.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(re.sub(_SETTING, r"\1", sentence))
        self.sentence = sentence

    def with_flags(self, flag: Callable[[str], str]) -> str:
        """The sentence with ``flag(name)`` for each setting."""
        return re.sub(_SETTING, lambda found: flag(found[1]), self.sentence)
