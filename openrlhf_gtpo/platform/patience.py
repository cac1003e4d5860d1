"""Tracks an agent's own silence, without the time it waits for others. ``training/rollout/rewards.py`` reads it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# When the user's code behind the current task began to work (infinity while others work for it), and how many such
# calls to others are open.
since: ContextVar[list[float]] = ContextVar("since")


@contextmanager
def others_work() -> Iterator[None]:
    """Stop an agent's clock within this block, because it waits for the engine or for its turn."""
    began = since.get([0.0, 0])
    began[0] = math.inf
    began[1] += 1
    try:
        yield
    finally:
        began[1] -= 1
        if not began[1]:
            began[0] = time.monotonic()
