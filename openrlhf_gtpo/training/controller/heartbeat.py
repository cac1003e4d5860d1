"""What the run does now, for those who watch, with a sign of life for the process that supervises it
(``--train.stall_timeout``)."""

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
    """Beats at each phase, and goes on beating while ranks that wait answer.

    Args:
        trackers: told of each phase too.
        groups: of Ray actors, which must answer while engines sample.
        is_moving: whether what a step waits for has moved in so many seconds.
    """

    def __init__(
        self, args: Arguments, trackers: Trackers, groups: Sequence[Any], is_moving: Callable[[float], bool]
    ) -> None:
        self._heartbeat = Heartbeat(args.ckpt.path) if args.train.stall_timeout else None
        self._trackers, self._groups, self._is_moving = trackers, groups, is_moving
        self._seconds = math.prod(Patience.of(args))  # a reward may hang in each of its tries

    @contextmanager
    def timed(self, phase: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Show a phase of a step, and add to ``metrics`` the seconds that it took."""
        self.show(phase)
        started = time.perf_counter()
        yield
        metrics[names.timing(phase)] = metrics.get(names.timing(phase), 0.0) + time.perf_counter() - started

    def show(self, phase: str) -> None:
        """The run begins a phase."""
        self._trackers.phase(phase)
        if self._heartbeat:
            # How long sampling takes is up to engines and rewards, which are watched from here. Ranks wait meanwhile.
            sampling = phase in (names.GENERATION, names.EVALUATION)
            ranks = [rank for group in self._groups for rank in group._actor_handlers]
            ranks_answer = answering(ranks)

            def goes_on() -> bool:
                return ranks_answer() and (phase != names.GENERATION or self._is_moving(self._seconds))

            self._heartbeat.beat(goes_on if sampling else None)

    def wait(self) -> None:
        """The run waits for what may take as long as it needs."""
        if self._heartbeat:
            self._heartbeat.beat(lambda: True)

    def clear(self) -> None:
        """Nobody needs to wait for the next beat."""
        if self._heartbeat:
            self._heartbeat.clear()
