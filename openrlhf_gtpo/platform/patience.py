"""Whose silence counts: an agent's own, not that of what it waits for. ``training/rollout/rewards.py`` reads it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# When the user's code that the current task waits for began to work, infinity while others work for it; and how many
# calls those others have.
since: ContextVar[list[float]] = ContextVar("since")


@contextmanager
def others_work() -> Iterator[None]:
    """Within this block, time does not count for the agent: the engine works for it, or it waits for its turn."""
    began = since.get([0.0, 0])
    began[0] = math.inf
    began[1] += 1
    try:
        yield
    finally:
        began[1] -= 1
        if not began[1]:
            began[0] = time.monotonic()
