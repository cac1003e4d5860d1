"""Costs of each step of a run: wall-clock seconds, real tokens, floating-point operations, and peak memory.

Always on: per step, this takes a pass over the rows' lengths and three small requests to the actors and engines.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import RayError

from openrlhf_gtpo.model_shape import ModelShape, forward_flops
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.cluster_checks import known_config
from openrlhf_gtpo.training.rows import Row

Peaks = dict[str, int]  # phase to bytes, for one process


class StepCosts:
    """Costs of the current step, whose progress the controller reports.

    Args:
        args: the run's arguments.
        actors: group of the policy's actors.
        engines: the rollout actors.

    Attributes:
        response_tokens: action tokens of this step.
    """

    def __init__(self, args: Arguments, actors: Any, engines: Sequence[Any] | None) -> None:
        self._shape = dense_shape(args.actor.model_name_or_path)
        self._actors = actors
        self._engines = engines or []
        self._costs: dict[str, float] = {}
        self.response_tokens = 0
        self.begin()

    def begin(self) -> None:
        """Begin a step; the time since the end of the last one belongs to neither."""
        self._begun = time.perf_counter()

    def after_rollout(self, rows: Sequence[Row]) -> None:
        """Count the ``rows`` of the rollout, and the engines' memory."""
        lengths = [len(row.tokens) for row in rows]
        self.response_tokens = sum(row.num_actions for row in rows)
        self._costs = {
            names.TOKENS_PROMPT: sum(lengths) - self.response_tokens,
            names.TOKENS_RESPONSE: self.response_tokens,
        }
        if self._shape is not None:
            self._costs[names.FLOPS_FORWARD] = float(forward_flops(self._shape, lengths, self.response_tokens))
        self._costs |= _largest("engine", self._engine_peaks(names.GENERATION))

    def after_training(self) -> None:
        """Take the peak memory of training and of the weight transfer."""
        self._costs |= _largest("engine", self._engine_peaks(names.BROADCAST))
        self._costs |= _largest("actor", ray.get(self._actors.async_run_method(method_name="take_peak_memory")))

    def end(self) -> dict[str, float]:
        """End the step; returns its metrics."""
        return self._costs | {names.TIMING_STEP_WALL: time.perf_counter() - self._begun}

    def _engine_peaks(self, phase: str) -> list[Peaks]:
        peaks: list[Peaks] = []
        for answer in [engine.take_peak_memory.remote(phase) for engine in self._engines]:
            with suppress(RayError):  # a dead engine, which the next weight transfer notices
                peaks += ray.get(answer)
        return peaks


def dense_shape(model: str) -> ModelShape | None:
    """Return a checkpoint's shape; None if :func:`forward_flops` does not know its layers. Runs no code of the
    model."""
    config = known_config(model)
    return None if config is None or getattr(config, "num_experts", None) else ModelShape.of(config)


def _largest(process: str, peaks: Iterable[Peaks]) -> dict[str, float]:
    """Return each phase's peak memory, in GiB, of the process that took most."""
    found: dict[str, float] = {}
    for each in peaks:
        for phase, size in each.items():
            name = names.peak_memory(process, phase)
            found[name] = max(found.get(name, 0.0), size / 2**30)
    return found
