"""The guide (``--algo.guide.*``): a frozen, stronger policy whose engines sample part of each group.

docs/guide.md describes the construction, and which of its parts come from a paper.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.algorithms import success
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.rows import Row

DEATHS = (RayActorError, OutOfMemoryError, EngineDeadError)  # of an engine's actor, and of vLLM's process

_ROUNDING = 1e-6  # of rows, over the prompts of a run


class Guide:
    """The guide's engines, and its number of rows in each group.

    Attributes:
        engines: handles of its rollout actors.
        rescue_batch: see ``RescueQueue``; 0 without one.
        step: training steps so far, with which the guide's fraction anneals.
    """

    def __init__(self, engines: Sequence[Any], args: Arguments) -> None:
        self.engines, self._args = engines, args
        self.rescue_batch: int = args.algo.guide.rescue_batch
        self._credit = entropy_credit(args)
        self._is_dead = self._is_awake = False
        self._given = [0] * len(engines)  # rows given to each
        self.step = 0

    @property
    def fraction(self) -> float:
        """The guide's current fraction of a step's rows: falls linearly from ``--algo.guide.fraction`` to 0 over
        ``--algo.guide.steps``, or is constant."""
        guide = self._args.algo.guide
        left = max(0.0, 1 - self.step / guide.steps) if guide.steps else 1.0
        return 0.0 if self._is_dead else guide.fraction * left

    def rows_of(self, number: int) -> tuple[Any, int] | None:
        """Return the engine to ask for rows in the group of prompt ``number``, and how many; None for none.

        The fraction of G rows need not be a whole number. Prompts get the number below or above it in turn, so that
        the fraction holds over a step.
        """
        rows = self.fraction * self._args.rollout.n_samples_per_prompt
        count = math.floor(rows * (number + 1) + _ROUNDING) - math.floor(rows * number + _ROUNDING)
        if not count:
            return None
        least = min(range(len(self.engines)), key=self._given.__getitem__)
        self._given[least] += count
        return self.engines[least], count

    def hangs(self, number: int, what: str) -> None:
        """Warn that an engine is killed because of ``what``; calls to it fail then."""
        print(f"Warning: engine {number} of the guide {what}; killing it.", flush=True)

    def died(self, how: str) -> None:
        """Continue without the guide, with one warning.

        Raises:
            TrainingStopped: ``--algo.guide.on_failure`` is stop.
        """
        if self._args.algo.guide.on_failure == "stop":
            logs = "its server's logs" if self._args.algo.guide.endpoint else "its node's Ray logs"
            raise TrainingStopped(
                f"An engine of the guide died ({how}); see {logs}. To continue without the guide, give "
                "--algo.guide.on_failure continue."
            )
        if not self._is_dead:
            print(f"Warning: the guide died ({how}); the policy samples all rows from now on.", flush=True)
        self._is_dead, self.rescue_batch = True, 0

    def is_success(self, row: Row) -> bool:
        """True if the row reaches the estimator's success threshold; with OpenRLHF's estimators, if its score is above
        the filter's lower bound."""
        if self._credit is not None:
            return bool(success(torch.tensor([row.reward]), self._credit.config.success_threshold))
        score = row.reward if row.score is None else row.score
        assert score is not None
        return score > self._args.algo.dynamic_filtering_range[0]

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Keep the engines awake within this block, if ``--vllm.enable_sleep`` lets them sleep otherwise."""
        sleeps = self._args.vllm.enable_sleep and not (self._args.algo.guide.endpoint or self._is_awake)
        if sleeps:
            self._call("wake_up")
        self._is_awake |= sleeps
        yield
        self._is_awake &= not sleeps
        if sleeps:
            self._call("sleep")

    def _call(self, method: str) -> None:
        """Call every engine, even if one has died, so that no living engine stays awake."""
        for ref in [getattr(engine, method).remote() for engine in self.engines]:
            try:
                ray.get(ref)
            except DEATHS as error:
                if not self._is_dead:
                    self.died(f"{type(error).__name__} at {method}")
