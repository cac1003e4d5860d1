"""What the steps of a run are trained on, in order: sampled when a step asks for it, or ahead of it
(``--train.async_enable``).

Ahead, a thread has the engines sample the next rollout while the policy trains on this one. Weights are sent when that
rollout is complete (``drain``). So all of its rows are of one policy, that of one step before, and what is sampled
follows from weights, prompts and seeds, whatever takes how long.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.rollout.packed import pack, unpack
from openrlhf_gtpo.training.rows import Rollout, ages

if TYPE_CHECKING:
    from openrlhf_gtpo.training.controller.controller import Controller

# In a checkpoint: what was sampled, or asked for, and not trained on.
_AHEAD, IN_FLIGHT = "rollouts_ahead", "prompts_in_flight"
LOADER = "data_loader_state_dict"
_NUMBERS = ("prompts", "exhausted", "passed", "tokens", "dropped", "version", "seconds")  # of a rollout


class Rollouts:
    """The rollouts of a run.

    Args:
        run: has the sampler, and sends weights.
        ahead: whether the next rollout is sampled while a step trains.
    """

    def __init__(self, run: "Controller", ahead: bool) -> None:
        self._run, self.ahead = run, ahead
        self._thread: threading.Thread | None = None
        self._busy = 0.0
        self._episodes = 0  # of which the thread has not come to the end
        self._ready: list[Rollout] = []  # complete, and not trained on
        self._under_way: Future[list[Rollout]] | None = None
        self._changed = threading.Condition()
        self._lacks_engines = False
        self._failure: BaseException | None = None  # on the thread that samples
        # Before the rollout that is sampled ahead: the loader's state, the sampler's ``drawn`` and ``of_pass``.
        self._place: tuple[Any, int, int] | None = None

    def begin(self, episodes: int) -> None:
        """``episodes`` follow, in which those begin that are ready."""
        self._episodes = episodes - sum(rollout.exhausted for rollout in self._ready)

    def next(self) -> Rollout:
        """The next step's rollout; one without rows ends an episode.

        Raises:
            Exception: what the sampler raised, on whichever thread.
        """
        if not self.ahead:
            return self._sample()
        while not self._ready:
            self._raise_failure()
            self._begin_next()
            self.drain()
            if self._lacks_engines:  # and no step is going to send weights
                self._run.send_weights()
        rollout = self._ready.pop(0)
        if not self._ready and self._episodes > 0 and all(each.may_sample_ahead() for each in self._run.features):
            sampler = self._run.sampler
            self._place = (self._run.prompts.state_dict(), sampler.drawn, sampler.of_pass)
            self._begin_next()
        return rollout

    def drain(self) -> None:
        """Wait until no engine samples: the rollout ahead is complete, has failed, or waits for an engine that has
        weights."""
        if self._under_way is None:
            return
        under_way = self._under_way
        with self._changed:
            self._changed.wait_for(lambda: under_way.done() or self._lacks_engines)
        if not under_way.done():
            return
        self._under_way, self._failure = None, under_way.exception()
        if self._failure is None:
            self._ready += under_way.result()
        elif self._place is not None:  # its prompts are drawn again
            _, self._run.sampler.drawn, self._run.sampler.of_pass = self._place

    @property
    def has_failed(self) -> bool:
        """Whether :meth:`next` is going to raise what ended the sampling, once the step in progress is logged."""
        return self._failure is not None

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._run.complete_checkpoint()
            raise self._failure

    def is_moving(self, seconds: float) -> bool:
        """Whether what the trainer waits for has moved in so many ``seconds``; a rollout may take as long as it
        likes."""
        return True

    def wait_for_weights(self) -> None:
        """On the thread that samples: wait until weights are sent, because no engine is left."""
        with self._changed:
            self._lacks_engines = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._lacks_engines)

    def weights_sent(self) -> bool:
        """The engines have the version's weights: a rollout that waited for them is completed before anything else.
        False if it waits again, because these engines died too."""
        if self._lacks_engines:
            with self._changed:
                self._lacks_engines = False
                self._changed.notify_all()
            self.drain()
        return not self._lacks_engines

    def still(self) -> AbstractContextManager[None]:
        """A block in which nothing is drawn or sampled to train on; between steps, that is so anyway."""
        return nullcontext()

    def end(self) -> None:
        """No step follows."""

    def describe(self, rollout: Rollout, step: int) -> dict[str, float]:
        """Metrics of how old the rows are that ``step`` has trained on, if they may be older than the step."""
        return staleness(rollout, step) if self.ahead else {}

    def is_on_thread(self) -> bool:
        """Whether the caller is on the thread that samples ahead."""
        return threading.current_thread() is self._thread

    def take_busy(self) -> float:
        """Seconds that the engines have sampled since the last call. None may sample now."""
        busy, self._busy = self._busy, 0.0
        return busy

    def state(self) -> dict[str, Any]:
        """For a checkpoint: what is sampled and not trained on, and the loader's place if it is another than now.
        Labels, which the rewards have read, are left out."""
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
        return {_AHEAD: packed} if packed else {}

    def restore(self, state: Mapping[str, Any]) -> int:
        """Take up what :meth:`state` returned; the prompts that were drawn for it.

        Raises:
            TrainingStopped: this run would leave it out.
        """
        for name, flag, goes_on in (
            (_AHEAD, "--train.async_enable", self.ahead),
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
            self._under_way = Future()
            self._thread = threading.Thread(target=self._sample_next, args=(self._under_way,), daemon=True)
            self._thread.start()

    def _sample_next(self, under_way: "Future[list[Rollout]]") -> None:
        """On the thread: a rollout, and before it those without rows, after which an episode begins."""
        rollouts: list[Rollout] = []
        try:
            while self._episodes > 0 and not (rollouts and rollouts[-1].rows):
                rollouts.append(self._sample())
                self._episodes -= rollouts[-1].exhausted
            under_way.set_result(rollouts)
        except BaseException as error:  # the controller's thread raises it
            under_way.set_exception(error)
        with self._changed:
            self._changed.notify_all()

    def _sample(self) -> Rollout:
        version, began = self._run.version, time.perf_counter()
        rollout: Rollout = self._run.sampler.sample()
        rollout.version, rollout.seconds = version, time.perf_counter() - began
        self._busy += rollout.seconds
        return rollout


def staleness(rollout: Rollout, step: int) -> dict[str, float]:
    """Metrics: the steps between the policy that sampled an action and the one that trains on it in ``step``."""
    found = np.concatenate([ages(row, rollout.version, step) for row in rollout.rows])
    return {names.STALENESS_MEAN: float(found.mean()), names.STALENESS_MAX: float(found.max())}
