"""Metrics of a Megatron training phase, under the names and weights that OpenRLHF's own trainer gives them."""

from collections import defaultdict
from dataclasses import fields
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience


class StepMetrics:
    """Sums over micro-batches, averaged by tokens or by samples over all replicas in :meth:`averages`."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._weights: dict[str, float] = {"token": 0.0, "sample": 0.0}

    def add(self, experience: Experience, of_loss: dict[str, float]) -> None:
        """One micro-batch: ``of_loss`` weighs as its action tokens do, the experience's own metrics as its rows."""
        tokens, samples = float(experience.action_mask.sum()), float(len(experience.action_mask))
        self._weights["token"] += tokens
        self._weights["sample"] += samples
        for name, value in of_loss.items():
            self._sums[name, "token"] += value * tokens
        for name, value in _of_rows(experience).items():
            if name not in of_loss:  # the loss's own wins, such as the KL
                self._sums[name, "sample"] += float(value.float().mean()) * samples

    def averages(self, reports: bool) -> dict[str, float]:
        """Over all ranks for which ``reports`` is true. Collective."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        mine = (dict(self._sums), self._weights) if reports else None
        torch.distributed.all_gather_object(gathered, mine)
        sums: dict[tuple[str, str], float] = defaultdict(float)
        weights: dict[str, float] = defaultdict(float)
        for theirs in filter(None, gathered):
            for key, value in theirs[0].items():
                sums[key] += value
            for kind, value in theirs[1].items():
                weights[kind] += value
        return {name: value / max(weights[kind], 1.0) for (name, kind), value in sums.items()}


def _of_rows(experience: Experience) -> dict[str, torch.Tensor]:
    """What OpenRLHF logs of each row: tensors and lists of ``info``, and the outcome fields."""
    found: dict[str, torch.Tensor] = {}
    for name, value in experience.info.items():
        if isinstance(value, list):
            found[name] = torch.tensor([float(one) for one in value])
        elif isinstance(value, torch.Tensor):
            found[name] = value
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if field.name in {"rewards", "scores"} or not Experience.is_episode_tensor_field(field.name):
            continue
        if isinstance(value, torch.Tensor) and field.name not in found:
            found[field.name] = value
    return found
