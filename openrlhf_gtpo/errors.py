"""The three ways in which a run ends on purpose; a command line prints their message alone, without a stack trace."""


class UsageError(ValueError):
    """The user asked for something that cannot work. Raised before any engine starts."""


class TrainingStopped(RuntimeError):
    """Training cannot go on: data that it must not learn from (a NaN, a failed reward; raised before weights change), a
    checkpoint that cannot be written, a node or process that died."""


class StoppedOnRequest(RuntimeError):
    """Training was asked to stop, and did so after a whole step, whose checkpoint is written."""
