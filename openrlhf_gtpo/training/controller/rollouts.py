"""What the steps of a run are trained on, in order: sampled when a step asks for it, or ahead of it
(``--train.async_enable``).

Ahead, engines sample the next rollout while the policy trains on this one. Weights are sent when that rollout is
complete (``drain``). So all of its rows are of one policy, that of one step before, and what is sampled follows from
weights, prompts and seeds, whatever takes how long.
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

# In a checkpoint: what was sampled, or asked for, and not trained on.
_AHEAD, IN_FLIGHT = "rollouts_ahead", "prompts_in_flight"
LOADER = "data_loader_state_dict"
_NUMBERS = ("prompts", "exhausted", "passed", "tokens", "dropped", "version", "seconds")  # of a rollout


class Rollouts:
    """The rollouts of a run.

    Args:
        sampler: samples one, on the engines' thread.
        loader: of its prompts, with their place in the data.
        engines: those that it asks.
        may_sample_ahead: whether what is trained on so many steps after the one that begins may have its first
            weights; None for a run in which nothing is sampled while a step trains.
    """

    def __init__(
        self, sampler: Any, loader: Any, engines: Engines, may_sample_ahead: Callable[[int], bool] | None
    ) -> None:
        self._sampler, self._loader, self._engines = sampler, loader, engines
        self._may_sample_ahead = may_sample_ahead
        self._busy = 0.0
        self._episodes = 0  # of which the sampler has not come to the end
        self._ready: list[Rollout] = []  # complete, and not trained on
        self._under_way: Future[list[Rollout]] | None = None
        self._failure: BaseException | None = None  # on the engines' thread
        # Before the rollout that is sampled ahead: the loader's state, the sampler's ``drawn`` and ``of_pass``.
        self._place: tuple[Any, int, int] | None = None

    def begin(self, episode: int, end: int) -> None:
        """The episodes from ``episode`` on follow, to the one before ``end``; what is ready belongs to the first."""
        self._episodes = end - episode - sum(rollout.exhausted for rollout in self._ready)

    def next(self) -> Rollout | None:
        """The next step's rollout; one without rows ends an episode. None if weights have to be sent for it.

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
        """Wait until no engine samples: the rollout under way is complete or has failed. False if it waits for
        weights."""
        under_way = self._under_way
        if under_way is None:
            return True
        if not self._engines.wait(under_way):
            return False
        self._under_way, self._failure = None, under_way.exception()
        if self._failure is None:
            self._ready += under_way.result()
        elif self._place is not None:  # its prompts are drawn again
            _, self._sampler.drawn, self._sampler.of_pass = self._place
        return True

    def weights_sent(self) -> bool:
        """The engines have new weights: a rollout that waited for them is completed before anything else. False if it
        waits again, because these engines died too."""
        return self.drain()

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`next` is going to raise what ended the sampling, once the step in progress is logged."""
        return self._failure is not None

    def is_moving(self, seconds: float) -> bool:
        """Whether what the trainer waits for has moved in so many ``seconds``; a rollout may take as long as it
        likes."""
        return True

    def still(self) -> AbstractContextManager[None]:
        """A block in which nothing is drawn or sampled to train on; between steps, that is so anyway."""
        return nullcontext()

    def end(self) -> None:
        """No step follows."""

    def take_busy(self) -> float:
        """Seconds that the engines have sampled since the last call. None may sample now."""
        busy, self._busy = self._busy, 0.0
        return busy

    def state(self) -> dict[str, Any]:
        """For a checkpoint: the place in the data, and what is sampled and not trained on. Labels, which the rewards
        have read, are left out."""
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
        """Take up what :meth:`state` returned; the prompts that were drawn for it.

        Raises:
            TrainingStopped: this run would leave it out.
        """
        for name, flag, goes_on in (
            (_AHEAD, "--train.async_enable", self._may_sample_ahead is not None),
            (IN_FLIGHT, "--train.partial_rollout_enable", False),
        ):
            if name in state and not goes_on:
                raise TrainingStopped(
                    f"The checkpoint is of a run with {flag}, and holds what was sampled ahead; give that flag to go "
                    "on from it."
                )
        self._ready = [
            Rollout(**each | {name: unpack(each[name]) for name in ("rows", "others")})
            for each in state.get(_AHEAD, ())
        ]
        return sum(rollout.prompts for rollout in self._ready)

    def _begin_next(self) -> None:
        if self._under_way is None:
            assert self._episodes > 0, "no prompt is left"
            self._under_way = self._engines.ask(self._sample_next)

    def _sample_next(self) -> list[Rollout]:
        """On the engines' thread: a rollout; ahead also, before it, those without rows, after which an episode
        begins."""
        rollouts: list[Rollout] = []
        while self._episodes > 0 and not (rollouts and (rollouts[-1].rows or self._may_sample_ahead is None)):
            version, began = self._engines.version, time.perf_counter()
            rollout: Rollout = self._sampler.sample()
            rollout.version, rollout.seconds = version, time.perf_counter() - began
            self._busy += rollout.seconds
            self._episodes -= rollout.exhausted
            rollouts.append(rollout)
        return rollouts
