"""Prompts at which the policy failed altogether, kept until the guide answers them (``--algo.guide.rescue_batch``)."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_gtpo.training.rows import Row

_BOUND = 4  # times --algo.guide.rescue_batch

# Of a row, what training reads of one that failed.
_KEPT = ("prompt", "label", "number", "tokens", "mask", "log_probs", "reward", "score", "truncated", "logs")


class RescueQueue:
    """The policy's failures by prompt, oldest first; beyond four batches of prompts, the oldest are given up.

    Attributes:
        rescued, given_up: prompts of the run so far that the guide answered correctly, and that nobody did.
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
        """Remove and return the failures at the oldest prompts, as many whole batches of prompts as are waiting."""
        whole = len(self) // self._batch_size * self._batch_size
        return [self._failures.pop(prompt) for prompt in list(self._failures)[:whole]]

    def state(self) -> dict[str, Any]:
        """The queue for a checkpoint, as a tensor: upstream prints all of a checkpoint's states, but abbreviates
        tensors."""
        failures = [[_plain(row) for row in rows] for rows in self._failures.values()]
        text = bytearray(json.dumps(failures).encode())
        return {"failures": torch.frombuffer(text, dtype=torch.uint8), "counts": (self.rescued, self.given_up)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the queue that :meth:`state` returned."""
        failures = json.loads(state["failures"].numpy().tobytes())
        self._failures = {rows[0]["prompt"]: [_row(row) for row in rows] for rows in failures}
        self.rescued, self.given_up = state["counts"]


def _plain(row: Row) -> dict[str, Any]:
    kept = {name: getattr(row, name) for name in _KEPT}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in kept.items()}


def _row(kept: Mapping[str, Any]) -> Row:
    arrays = {"tokens": np.int64, "mask": bool, "log_probs": np.float32}
    return Row(**dict(kept) | {name: np.array(kept[name], dtype=kind) for name, kind in arrays.items()})
