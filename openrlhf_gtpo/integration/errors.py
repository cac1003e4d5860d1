"""The two ways in which a run ends on purpose; a command line prints their message alone, without a stack trace."""


class UsageError(ValueError):
    """The user asked for something that cannot work. Raised before any engine starts."""


class TrainingStopped(RuntimeError):
    """Training met data that it must not learn from (a NaN, a failed reward). Raised before weights change."""
