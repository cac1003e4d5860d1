"""A run's heartbeat: a file that its controller touches whenever it makes progress.

The file is in a folder that all nodes share, because Ray chooses the controller's node. It is absent while engines and
models load and while the trained model is written. Their duration varies, and they have their own limits.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_EVERY = 1.0  # seconds


class Heartbeat:
    """The heartbeat of the run with its checkpoints in ``folder``, for its controller and its supervisor."""

    def __init__(self, folder: str | Path) -> None:
        self._path = Path(folder) / "heartbeat"
        self._rest = threading.Event()
        self._beating: threading.Thread | None = None
        self._last: int | None = None
        self._seen = 0.0

    def beat(self, going_on: Callable[[], bool] | None = None) -> None:
        """Signal that the run is making progress.

        Args:
            going_on: keep signaling until the next call, whenever this returns true, unless this process is stopped.
        """
        self._end_beating()
        self._touch()
        if going_on:
            self._beating = threading.Thread(target=self._beat_on, args=(going_on,), daemon=True)
            self._beating.start()

    def clear(self) -> None:
        """Remove the file, so that nobody waits for the next beat."""
        self._end_beating()
        self._path.unlink(missing_ok=True)

    def silence(self) -> float:
        """Seconds since this process saw the last beat, by its own clock, because nodes' clocks differ; 0 if no beat
        is due."""
        try:
            beat = self._path.stat().st_mtime_ns
        except OSError:
            beat = None
        if beat != self._last:
            self._last, self._seen = beat, time.monotonic()
        return 0.0 if beat is None else time.monotonic() - self._seen

    def _touch(self) -> None:
        with suppress(OSError):  # a full disk must not stop the run
            self._path.parent.mkdir(parents=True, exist_ok=True)  # before the first checkpoint
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
