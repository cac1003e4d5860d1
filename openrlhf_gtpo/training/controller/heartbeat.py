"""The run's current phase, for watchers, and its heartbeat for the supervising process (``--train.stall_timeout``)."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.controller.failures import answering
from openrlhf_gtpo.training.controller.trackers import Trackers
from openrlhf_gtpo.training.rollout.rewards import Patience


class Phases:
    """A heartbeat at each phase, which continues during a rollout while idle ranks answer.

    Args:
        trackers: note each phase too.
        groups: groups of Ray actors, which must answer while engines sample.
        is_moving: whether the rollout that a step waits for has moved within so many seconds.
    """

    def __init__(
        self, args: Arguments, trackers: Trackers, groups: Sequence[Any], is_moving: Callable[[float], bool]
    ) -> None:
        self._heartbeat = Heartbeat(args.ckpt.path) if args.train.stall_timeout else None
        self._trackers, self._groups, self._is_moving = trackers, groups, is_moving
        self._seconds = math.prod(Patience.of(args))  # a reward may hang in each of its tries

    @contextmanager
    def timed(self, phase: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Show a phase of a step, and add its seconds to ``metrics``."""
        self.show(phase)
        started = time.perf_counter()
        yield
        metrics[names.timing(phase)] = metrics.get(names.timing(phase), 0.0) + time.perf_counter() - started

    def show(self, phase: str) -> None:
        """Begin a phase."""
        self._trackers.phase(phase)
        if self._heartbeat:
            # Sampling may take as long as engines and rewards need, which others watch. Ranks wait and must answer.
            sampling = phase in (names.GENERATION, names.EVALUATION)
            ranks = [rank for group in self._groups for rank in group._actor_handlers]
            ranks_answer = answering(ranks)

            def is_alive() -> bool:
                return ranks_answer() and (phase != names.GENERATION or self._is_moving(self._seconds))

            self._heartbeat.beat(is_alive if sampling else None)

    def wait(self) -> None:
        """Note that the run waits for something without a time limit from now on."""
        if self._heartbeat:
            self._heartbeat.beat(lambda: True)

    def clear(self) -> None:
        """End the heartbeat."""
        if self._heartbeat:
            self._heartbeat.clear()
