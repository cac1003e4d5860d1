"""A reward that holds a run after a step, so that a test can act on it in the middle, however fast the machine is."""

from pathlib import Path

from tests.e2e.conftest import REWARD

_PROGRAM = """
import importlib.util
import json
import os
import time
from pathlib import Path

FOLDER = Path({folder!r})
spec = importlib.util.spec_from_file_location("reward", {reward!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


def last_step():
    path = FOLDER / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return max((row["step"] for row in rows if row["kind"] == "train"), default=0)


def limit():
    try:
        return int((FOLDER / "hold").read_text())
    except (OSError, ValueError):
        return float("inf")


def wait():
    deadline = time.monotonic() + 600
    if last_step() >= limit():
        (FOLDER / f"held-{{os.getpid()}}").touch()
    while last_step() >= limit():
        assert time.monotonic() < deadline, "nobody lets the run go on"
        time.sleep(0.1)


def reward_func(queries, prompts, labels):
    wait()
    return module.reward_func(queries, prompts, labels)
"""


class Hold:
    """Holds the run whose metrics are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._limit = folder / "hold"
        self.reward = folder / "holding_reward.py"
        self.reward.write_text(_PROGRAM.format(folder=str(folder), reward=str(REWARD)))

    def after(self, step: int) -> None:
        """Let the run make steps up to this one; the rollout of the next waits."""
        fresh = self._limit.with_suffix(".new")
        fresh.write_text(str(step))
        fresh.rename(self._limit)

    def held(self) -> list[int]:
        """Process ids of the actors whose engines have waited."""
        return [int(path.name.partition("-")[2]) for path in self._folder.glob("held-*")]

    def release(self) -> None:
        """Let the run make all further steps."""
        self._limit.unlink()
