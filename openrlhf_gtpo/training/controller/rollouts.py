"""The rollouts of a run in order, sampled when a step asks for them or one step ahead (``--train.async_enable``).

Ahead, engines sample the next rollout while the policy trains on this one. Weights are sent when that rollout is
complete (``drain``). So all of its rows come from one policy, that of the step before. Timing does not matter:
weights, prompts and seeds decide what is sampled.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.controller.engines import Engines
from openrlhf_gtpo.training.rollout.packed import pack, unpack
from openrlhf_gtpo.training.rows import Rollout

# In a checkpoint: rollouts that were sampled, and prompts that were asked for, but not trained on.
_AHEAD, IN_FLIGHT = "rollouts_ahead", "prompts_in_flight"
LOADER = "data_loader_state_dict"
_NUMBERS = ("prompts", "exhausted", "passed", "tokens", "dropped", "version", "seconds")  # of a rollout


class Rollouts:
    """The rollouts of a run.

    Args:
        sampler: samples a rollout, on the engines' thread.
        loader: the loader of its prompts, with their place in the data.
        engines: the engines that it asks.
        may_sample_ahead: whether a rollout for so many steps later may be sampled with the weights of the step that
            begins; None for a run that samples nothing while a step trains.
    """

    def __init__(
        self, sampler: Any, loader: Any, engines: Engines, may_sample_ahead: Callable[[int], bool] | None
    ) -> None:
        self._sampler, self._loader, self._engines = sampler, loader, engines
        self._may_sample_ahead = may_sample_ahead
        self._busy = 0.0
        self._episodes = 0  # that the sampler has not finished
        self._ready: list[Rollout] = []  # complete, but not trained on
        self._under_way: Future[list[Rollout]] | None = None
        self._failure: BaseException | None = None  # on the engines' thread
        # Before the rollout that is sampled ahead: the loader's state, the sampler's ``drawn`` and ``of_pass``.
        self._place: tuple[Any, int, int] | None = None

    def begin(self, episode: int, end: int) -> None:
        """Begin with ``episode``, up to but not including ``end``. Ready rollouts belong to the first episodes."""
        self._episodes = end - episode - sum(rollout.exhausted for rollout in self._ready)

    def next(self) -> Rollout | None:
        """Return the next step's rollout; without rows, it ends an episode. None if it needs new weights first.

        Raises:
            Exception: what the sampler raised.
        """
        while not self._ready:
            if self._failure is not None:
                raise self._failure
            self._begin_next()
            if not self.drain():
                return None
        rollout = self._ready.pop(0)
        if self._may_sample_ahead and not self._ready and self._episodes > 0 and self._may_sample_ahead(1):
            self._place = (self._loader.state_dict(), self._sampler.drawn, self._sampler.of_pass)
            self._begin_next()
        return rollout

    def drain(self) -> bool:
        """Wait until the current rollout is complete or has failed. False if it waits for weights."""
        under_way = self._under_way
        if under_way is None:
            return True
        if not self._engines.wait(under_way):
            return False
        self._under_way, self._failure = None, under_way.exception()
        if self._failure is None:
            self._ready += under_way.result()
        elif self._place is not None:  # draw its prompts again
            _, self._sampler.drawn, self._sampler.of_pass = self._place
        return True

    def weights_sent(self) -> bool:
        """Complete a rollout that waited for the weights which the engines have now. False if it waits again, because
        these engines died too."""
        return self.drain()

    @property
    def has_failed(self) -> bool:
        """True if sampling failed: :meth:`next` raises the error, after the current step is logged."""
        return self._failure is not None

    def is_moving(self, seconds: float) -> bool:
        """True if sampling has moved within so many ``seconds``; always, as a rollout may take any time."""
        return True

    def still(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is drawn or sampled for training, as is the case between steps anyway."""
        return nullcontext()

    def end(self) -> None:
        """End: no step follows."""

    def take_busy(self) -> float:
        """Return the seconds that engines have sampled since the last call. None may be sampling now."""
        busy, self._busy = self._busy, 0.0
        return busy

    def state(self) -> dict[str, Any]:
        """Return a checkpoint's state: the place in the data, and rollouts that were not trained on, without labels,
        which only rewards need."""
        assert self._under_way is None, "engines sample"
        if self.has_failed:
            assert self._place is not None
            return {LOADER: self._place[0]}
        packed = []
        for rollout in self._ready:
            numbers = {name: getattr(rollout, name) for name in _NUMBERS}
            rows = {
                name: pack([dataclasses.replace(row, label=None) for row in getattr(rollout, name)])
                for name in ("rows", "others")
            }
            packed.append(numbers | rows)
        return {LOADER: self._loader.state_dict()} | ({_AHEAD: packed} if packed else {})

    def restore(self, state: Mapping[str, Any]) -> int:
        """Restore what :meth:`state` returned; returns the number of prompts drawn for it.

        Raises:
            TrainingStopped: this run would drop rollouts that the checkpoint holds.
        """
        for name, flag, is_on in (
            (_AHEAD, "--train.async_enable", self._may_sample_ahead is not None),
            (IN_FLIGHT, "--train.partial_rollout_enable", False),
        ):
            if name in state and not is_on:
                raise TrainingStopped(
                    f"The checkpoint holds rollouts that were sampled ahead with {flag}; give that flag to resume "
                    "from it."
                )
        self._ready = [
            Rollout(**each | {name: unpack(each[name]) for name in ("rows", "others")})
            for each in state.get(_AHEAD, ())
        ]
        return sum(rollout.prompts for rollout in self._ready)

    def _begin_next(self) -> None:
        if self._under_way is None:
            assert self._episodes > 0, "there are no prompts left"
            self._under_way = self._engines.ask(self._sample_next)

    def _sample_next(self) -> list[Rollout]:
        """On the engines' thread: sample a rollout. Ahead, also return the empty ones before it, which end
        episodes."""
        rollouts: list[Rollout] = []
        while self._episodes > 0 and not (rollouts and (rollouts[-1].rows or self._may_sample_ahead is None)):
            version, began = self._engines.version, time.perf_counter()
            rollout: Rollout = self._sampler.sample()
            rollout.version, rollout.seconds = version, time.perf_counter() - began
            self._busy += rollout.seconds
            self._episodes -= rollout.exhausted
            rollouts.append(rollout)
        return rollouts
