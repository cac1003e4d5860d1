"""Metrics of a training phase, under OpenRLHF's names, that do not depend on how rows were split over micro-batches."""

from collections import defaultdict
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class StepMetrics:
    """Sums over micro-batches, and in :meth:`averages` over all replicas.

    A loss is a part of its optimizer step's, so parts are added up and averaged over steps. Any other scalar is a mean over
    action tokens, and anything else has a value for each row. (OpenRLHF averages the parts over tokens, as if each were a mean.)

    Args:
        args: the run's arguments, which decide what ``kl`` and ``is_filter_ratio`` are.
        replicas: how often a part counts: their number where gradients are averaged over them, 1 where they are added up.
    """

    def __init__(self, args: SimpleNamespace, replicas: int = 1) -> None:
        self._parts = {"policy_loss", "entropy_loss", "critic_loss"} | ({"kl"} if args.algo.kl.use_loss else set())
        self._of_rows = {"is_filter_ratio"} if args.algo.advantage.is_correction_level == "seq" else set()
        self._replicas = replicas
        self._sums: dict[tuple[str, str], float] = defaultdict(float)
        self._weights = {"token": 0.0, "row": 0.0}

    def add(self, values: Mapping[str, Tensor], tokens: float, rows: int) -> None:
        """One micro-batch of ``rows`` rows with ``tokens`` action tokens: scalars, or (rows,) each."""
        self._weights["token"] += tokens
        self._weights["row"] += rows
        for name, value in values.items():
            mean = float(value.float().mean())
            if name in self._parts:
                self._sums[name, "step"] += mean / self._replicas
            elif value.dim() > 0 or name in self._of_rows:
                self._sums[name, "row"] += mean * rows
            elif tokens:  # a mean over no token is not a number
                self._sums[name, "token"] += mean * tokens

    def averages(self, steps: int, reports: bool) -> dict[str, float]:
        """Over ``steps`` optimizer steps and all ranks for which ``reports`` is true, one of each replica. Collective."""
        gathered: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(gathered, (dict(self._sums), self._weights) if reports else None)
        sums: dict[tuple[str, str], float] = defaultdict(float)
        weights = {"token": 0.0, "row": 0.0, "step": float(steps)}
        for theirs in filter(None, gathered):
            for key, value in theirs[0].items():
                sums[key] += value
            for kind, value in theirs[1].items():
                weights[kind] += value
        return {name: value / max(weights[kind], 1.0) for (name, kind), value in sums.items()}
