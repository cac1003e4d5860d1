"""A sign of life of a run: a file that its controller touches whenever it gets on with its work.

It is in a folder that all nodes share, as the controller is on a node that Ray chose. There is none while engines and
models load and while the trained model is written: those take what they take, and have limits of their own.
"""

import time
from pathlib import Path


class Heartbeat:
    """Of the run with the checkpoints in ``folder``, for its controller and for whoever watches it."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / "heartbeat"
        self._last: int | None = None
        self._seen = 0.0

    def beat(self) -> None:
        self._path.touch()

    def clear(self) -> None:
        """Nobody is to wait for the next beat."""
        self._path.unlink(missing_ok=True)

    def silence(self) -> float:
        """Seconds since this process saw the last beat, by its own clock, as another node's may differ; 0 where nobody
        is to wait for one."""
        try:
            beat = self._path.stat().st_mtime_ns
        except OSError:
            beat = None
        if beat != self._last:
            self._last, self._seen = beat, time.monotonic()
        return 0.0 if beat is None else time.monotonic() - self._seen
