"""A queue of prompts that the policy always failed, until the guide answers them (``--algo.guide.rescue_batch``)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf_gtpo.training.rollout.packed import pack, unpack
from openrlhf_gtpo.training.rows import Row

_BOUND = 4  # times --algo.guide.rescue_batch


class RescueQueue:
    """The policy's failures by prompt, oldest first. Beyond four batches of prompts, the oldest are given up.

    Attributes:
        rescued, given_up: the run's prompts so far that the guide answered correctly, and that nobody did.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._failures: dict[str, list[Row]] = {}
        self.rescued = self.given_up = 0

    def __len__(self) -> int:
        return len(self._failures)

    def add(self, rows: Sequence[Row]) -> None:
        """Add the policy's failures at a prompt; they replace earlier ones at the same prompt."""
        prompt = rows[0].prompt
        self._failures.pop(prompt, None)
        self._failures[prompt] = [dataclasses.replace(row, values=None, metrics={}) for row in rows]
        while len(self._failures) > _BOUND * self._batch_size:
            del self._failures[next(iter(self._failures))]
            self.given_up += 1

    def take(self) -> list[list[Row]]:
        """Remove and return the failures at the oldest prompts, in whole batches of prompts, as many as are
        waiting."""
        whole = len(self) // self._batch_size * self._batch_size
        return [self._failures.pop(prompt) for prompt in list(self._failures)[:whole]]

    def state(self) -> dict[str, Any]:
        """Return the queue for a checkpoint."""
        failures = pack([row for rows in self._failures.values() for row in rows])
        return {"failures": failures, "counts": (self.rescued, self.given_up)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the queue that :meth:`state` returned."""
        self._failures = {}
        for row in unpack(state["failures"]):
            self._failures.setdefault(row.prompt, []).append(row)
        self.rescued, self.given_up = state["counts"]
