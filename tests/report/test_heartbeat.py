"""A controller that samples for hours gives signs of life; one that is stopped or has finished does not."""

import os
import time
from pathlib import Path

import pytest

from openrlhf_gtpo.report.heartbeat import Heartbeat


@pytest.mark.usefixtures("brief_waits")
def test_it_beats_steadily_only_where_it_is_told(tmp_path: Path) -> None:
    of_a_run, path, beats = Heartbeat(tmp_path), tmp_path / "heartbeat", list[int]()

    def going_on() -> bool:
        """In the first four of eight questions. What it was told before is done when it asks again."""
        beats.append(path.stat().st_mtime_ns)
        os.utime(path, ns=(0, 0))
        return len(beats) <= 4

    of_a_run.beat(going_on)
    while len(beats) < 8:
        time.sleep(0.01)
    of_a_run.beat()
    asked = len(beats)
    assert all(beats[:5]) and not any(beats[5:]) and path.stat().st_mtime_ns
    of_a_run.beat(lambda: True)
    of_a_run.clear()
    time.sleep(0.1)
    assert not path.exists() and len(beats) == asked


def test_it_beats_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """Whose folder nobody else makes before."""
    Heartbeat(tmp_path / "absent" / "checkpoints").beat()
    assert (tmp_path / "absent" / "checkpoints" / "heartbeat").exists()
