"""Prompts at which the policy failed altogether, kept until the guide answers them (``--algo.guide.rescue_batch``)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

Response = dict[str, Any]  # of a rollout actor

_BOUND = 4  # times --algo.guide.rescue_batch


class RescueQueue:
    """The policy's failures by prompt, oldest first; beyond four batches of prompts, the oldest are given up.

    Attributes:
        rescued, given_up: prompts of the run so far that the guide answered correctly, and that nobody did.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._failures: dict[str, list[Response]] = {}
        self.rescued = self.given_up = 0

    def __len__(self) -> int:
        return len(self._failures)

    def add(self, responses: Sequence[Response]) -> None:
        """Add the policy's failures at a prompt; they replace earlier ones at the same prompt."""
        prompt = responses[0]["prompt"]
        self._failures.pop(prompt, None)
        self._failures[prompt] = [plain(response) for response in responses]
        while len(self._failures) > _BOUND * self._batch_size:
            del self._failures[next(iter(self._failures))]
            self.given_up += 1

    def take(self) -> list[list[Response]]:
        """Remove and return the failures at the oldest prompts, as many whole batches of prompts as are waiting."""
        whole = len(self) // self._batch_size * self._batch_size
        return [self._failures.pop(prompt) for prompt in list(self._failures)[:whole]]

    def state(self) -> dict[str, Any]:
        """The queue for a checkpoint, as a tensor: upstream prints all of a checkpoint's states, but abbreviates
        tensors."""
        text = bytearray(json.dumps(list(self._failures.values())).encode())
        return {"failures": torch.frombuffer(text, dtype=torch.uint8), "counts": (self.rescued, self.given_up)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the queue that :meth:`state` returned."""
        failures = json.loads(state["failures"].numpy().tobytes())
        self._failures = {responses[0]["prompt"]: responses for responses in failures}
        self.rescued, self.given_up = state["counts"]


def plain(response: Response) -> Response:
    """The parts of a response that training reads, as plain Python values: a reward or an agent may return NumPy's or
    torch's."""
    kept = {name: response[name] for name in ("prompt", "label", "prompt_number")}
    lists = ("observation_tokens", "action_ranges", "rollout_log_probs")
    kept |= {name: np.asarray(response[name]).tolist() for name in lists}
    kept |= {name: float(response[name]) for name in ("reward", "scores")}
    logs = {name: torch.as_tensor(value).flatten()[0].item() for name, value in response.get("extra_logs", {}).items()}
    return kept | {"truncated": bool(response.get("truncated", False)), "extra_logs": logs}  # upstream's defaults
