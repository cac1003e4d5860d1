"""A controller that samples for hours gives signs of life; one that is stopped or has finished does not."""

import time
from pathlib import Path

import pytest

from openrlhf_gtpo.report.heartbeat import Heartbeat


def beats(path: Path, within: float = 60) -> bool:
    """True if anything touches the file within so many seconds."""
    before, deadline = path.stat().st_mtime_ns, time.monotonic() + within
    while path.stat().st_mtime_ns == before and time.monotonic() < deadline:
        time.sleep(0.01)
    return path.stat().st_mtime_ns != before


@pytest.mark.usefixtures("brief_waits")
def test_it_beats_steadily_only_where_it_is_told(tmp_path: Path) -> None:
    of_a_run, path = Heartbeat(tmp_path), tmp_path / "heartbeat"
    answers = [True] * 4
    of_a_run.beat(lambda: True)
    assert beats(path) and beats(path)
    of_a_run.beat(lambda: bool(answers and answers.pop()))
    assert beats(path)
    while answers:
        time.sleep(0.01)
    beats(path, within=0.1)  # the last of them
    assert not beats(path, within=0.2)
    of_a_run.beat()
    assert not beats(path, within=0.2)
    of_a_run.beat(lambda: True)
    of_a_run.clear()
    time.sleep(0.1)
    assert not path.exists()


def test_it_beats_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """Whose folder nobody else makes before."""
    Heartbeat(tmp_path / "absent" / "checkpoints").beat()
    assert (tmp_path / "absent" / "checkpoints" / "heartbeat").exists()
