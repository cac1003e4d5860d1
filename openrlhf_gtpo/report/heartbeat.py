"""A sign of life of a run: a file that its controller touches whenever it gets on with its work.

It is in a folder that all nodes share, as the controller is on a node that Ray chose. There is none while engines and
models load and while the trained model is written: those take what they take, and have limits of their own.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_EVERY = 1.0  # seconds


class Heartbeat:
    """The sign of life of the run with the checkpoints in ``folder``, for its controller and for whoever watches
    it."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / "heartbeat"
        self._rest = threading.Event()
        self._beating: threading.Thread | None = None
        self._last: int | None = None
        self._seen = 0.0

    def beat(self, going_on: Callable[[], bool] | None = None) -> None:
        """Say that the run gets on.

        Args:
            going_on: and go on saying so until the next call, each time that this returns true, while this process is
                not stopped.
        """
        self._end_beating()
        self._touch()
        if going_on:
            self._beating = threading.Thread(target=self._beat_on, args=(going_on,), daemon=True)
            self._beating.start()

    def clear(self) -> None:
        """Nobody is to wait for the next beat."""
        self._end_beating()
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

    def _touch(self) -> None:
        with suppress(OSError):  # a full disk is no reason to stop
            self._path.touch()

    def _beat_on(self, going_on: Callable[[], bool]) -> None:
        while not self._rest.wait(_EVERY):
            if going_on():
                self._touch()

    def _end_beating(self) -> None:
        if self._beating is not None:
            self._rest.set()
            self._beating.join()
            self._rest.clear()
            self._beating = None
