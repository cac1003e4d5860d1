"""The run's vLLM engines as its controller sees them: which of them serve, which died or hang, and their way back.

Ray starts an engine that died again (``max_restarts`` of its actor), on the same GPUs and behind the same handle, and
the run goes on with the others. It begins with the weights of the model's checkpoint and refuses to sample from them
(``EngineRestarted``); the next transfer of weights makes the group anew with it, and proves by checksums that they
arrived. A transfer that an engine's death interrupts ends the run.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.integration.controller.failures import DIED, cause_of
from openrlhf_gtpo.integration.rollout.rollout_actor import EngineRestarted

_ANSWER = 10.0  # seconds that an engine has to say that it serves; a slower one is not dead
_LOOK_EVERY = 1.0


class Engines:
    """Which engines serve.

    Args:
        serving: handles of all engines. The list is kept, in place, to those that serve: whoever holds it sees it.
        max_restarts: engines that may be lost before the run stops.
        stall_timeout: seconds without an answer after which an engine is killed, or 0.

    Attributes:
        restarts: engines that were lost so far.
    """

    def __init__(self, serving: list[Any], max_restarts: int, stall_timeout: float) -> None:
        self.serving = serving
        self.restarts = 0
        self._all = list(serving)
        self._max_restarts = max_restarts
        self._killed: dict[int, str] = {}  # those that were killed and are not lost yet, by number: what to say
        self._stall_timeout = stall_timeout

    def watch(self) -> None:
        """Have engines that do not answer killed from now on: all have loaded, and met the trainer for the weights.
        And those whose vLLM process died, to start again before somebody needs them."""
        if self._max_restarts or self._stall_timeout:
            limit = self._stall_timeout or math.inf
            kill_hanging(self._all, limit, self._killed.__setitem__, self._is_watched, EngineDeadError)

    def _is_watched(self, engine: Any) -> bool:
        return engine in self.serving and self._all.index(engine) not in self._killed

    def check(self) -> int:
        """Take those that died off the list; returns how many.

        Raises:
            TrainingStopped: more than ``max_restarts`` have been lost.
        """
        asked = {engine.serves.remote(): engine for engine in self.serving}
        answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_ANSWER) if asked else ([], [])
        before = self.restarts
        for ref in answered:
            try:
                ray.get(ref)
            except RayError as error:
                self._lose(asked[ref], error)
        return self.restarts - before

    def _lose(self, engine: Any, error: RayError) -> None:
        self.serving.remove(engine)
        self.restarts += 1
        number = self._all.index(engine)
        killed = self._killed.pop(number, None)
        what = killed or f"died: {' '.join(str(error).split())[-300:]}"
        said = f"vLLM engine {number} of {len(self._all)} (counted from 0) {what}"
        if self.restarts > self._max_restarts:
            limit = f"--train.max_restarts {self._max_restarts} allows no further restart"
            raise TrainingStopped(f"{said} ({limit}; its node's Ray logs say more)") from None
        if killed is None and cause_of(error, (*DIED, EngineRestarted)) is None:
            ray.kill(engine, no_restart=False)  # vLLM's process died, the actor did not
        print(f"Warning: {said}. It is started again; the others answer its prompts until then.", flush=True)

    def recover(self, error: Exception) -> None:
        """Return where it was an engine's failure that raised ``error``; the list may be empty then.

        Raises:
            TrainingStopped: as :meth:`check`.
        """
        of_an_engine = cause_of(error, (*DIED, EngineRestarted, EngineDeadError))
        if not self.check() and of_an_engine is None:
            raise error

    def bring_back(self, policy: Any) -> None:
        """Have the engines that were lost join the group for weights, which have to be sent then.

        Args:
            policy: group of the policy's actors.

        Raises:
            TrainingStopped: one did not start again.
        """
        lost = [engine for engine in self._all if engine not in self.serving]
        if not lost:
            return
        began = time.monotonic()
        ray.get([actor.__ray_call__.remote(_rejoin) for actor in policy._actor_handlers])
        self.serving[:] = self._all
        numbers = ", ".join(str(self._all.index(engine)) for engine in lost)
        print(f"vLLM engines {numbers} are back, after {time.monotonic() - began:.0f} s of waiting.", flush=True)


def kill_hanging(
    engines: Sequence[Any],
    stall_timeout: float,
    note: Callable[[int, str], None],
    serves: Callable[[Any], bool] = lambda engine: True,
    death: type[Exception] | tuple[()] = (),
) -> None:
    """Kill engines that do not answer from now on, so that whoever waits for them hears of it.

    Args:
        stall_timeout: seconds without an answer; with 0 none is killed.
        note: gets the number of one and what to say of it, before it is killed.
        serves: whether an engine is to answer.
        death: an answer for which it is killed at once.
    """

    def what_is_wrong(ref: Any, is_answered: bool) -> str | None:
        if not is_answered:
            return f"did not answer for {stall_timeout:g} s"
        try:
            ray.get(ref)
        except RayError as error:
            died = cause_of(error, death)
            return None if died is None else f"died: {died}"
        return None

    def watch() -> None:
        asked: dict[int, tuple[Any, float]] = {}  # by number
        while True:
            for number, engine in enumerate(engines):
                if number not in asked and serves(engine):
                    asked[number] = engine.serves.remote(), time.monotonic()
            refs = [ref for ref, _ in asked.values()]
            answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_LOOK_EVERY) if refs else ([], [])
            for number, (ref, since) in list(asked.items()):
                if ref not in answered and time.monotonic() - since < stall_timeout:
                    continue
                del asked[number]
                wrong = what_is_wrong(ref, ref in answered)
                if wrong and serves(engines[number]):  # nobody has killed it meanwhile
                    note(number, wrong)
                    ray.kill(engines[number], no_restart=False)
            time.sleep(_LOOK_EVERY)

    if stall_timeout:
        threading.Thread(target=watch, daemon=True).start()


def _rejoin(actor: Any) -> None:
    actor.trainer.rejoin_engines()
