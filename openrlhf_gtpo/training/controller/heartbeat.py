"""The run's sign of life, for the process that supervises it (``--train.stall_timeout``)."""

import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.training.controller.failures import answering
from openrlhf_gtpo.training.rollout.rewards import Patience


class Watched:
    """Beats at each phase, and goes on beating while ranks that wait answer.

    Args:
        groups: of Ray actors, which must answer while engines sample.
        is_moving: whether what a step waits for has moved in so many seconds.
    """

    def __init__(self, args: SimpleNamespace, groups: Sequence[Any], is_moving: Callable[[float], bool]) -> None:
        self._heartbeat = Heartbeat(args.ckpt.path) if args.train.stall_timeout else None
        self._groups, self._is_moving = groups, is_moving
        self._seconds = math.prod(Patience.of(args))  # a reward may hang in each of its tries

    def show(self, phase: str) -> None:
        """The run begins a phase."""
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
