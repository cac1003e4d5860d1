"""The run's vLLM engines as its controller sees them: which serve, which have died or hang, and how they come back.

Ray restarts an engine that died (``max_restarts`` of its actor) on the same GPUs and behind the same handle, and the
run goes on with the others. A restarted engine has the weights of the model's checkpoint and refuses to sample from
them (``EngineRestarted``); the next weight transfer forms a new group with that engine, and proves by checksums
that the weights arrived. If an engine's death interrupts a transfer, the run ends.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped, last_error
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.controller.failures import DIED, cause_of
from openrlhf_gtpo.training.rollout.rollout_actor import EngineRestarted

_ANSWER = 10.0  # seconds for an engine to say that it serves; a slower one is not taken for dead
_LOOK_EVERY = 1.0


class Engines:
    """Keeps track of which engines serve.

    Args:
        serving: handles of all engines. Updated in place, so that whoever holds the list sees only those that serve.
        max_restarts: engines that may be lost before the run stops.
        stall_timeout: seconds without an answer after which an engine is killed, or 0.

    Attributes:
        restarts: engines lost so far.
    """

    def __init__(self, serving: list[Any], max_restarts: int, stall_timeout: float) -> None:
        self.serving = serving
        self.restarts = 0
        self._all = list(serving)
        self._max_restarts = max_restarts
        self._killed: dict[int, str] = {}  # what to say of engines killed but not yet counted as lost, by number
        self._stall_timeout = stall_timeout

    def watch(self) -> None:
        """From now on, kill engines that do not answer: all have loaded and met the trainer for the weights. Also kill
        those whose vLLM process died, so that they restart before somebody needs them."""
        if self._max_restarts or self._stall_timeout:
            limit = self._stall_timeout or math.inf
            kill_hanging(self._all, limit, self._killed.__setitem__, self._is_watched, EngineDeadError)

    def _is_watched(self, engine: Any) -> bool:
        return engine in self.serving and self._all.index(engine) not in self._killed

    def check(self) -> int:
        """Remove dead engines from the list, and return how many there were.

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
        what = killed or f"died: {last_error(error, 300)}"
        said = f"vLLM engine {number} of {len(self._all)} (counted from 0) {what}"
        if self.restarts > self._max_restarts:
            limit = f"--train.max_restarts {self._max_restarts} allows no further restart"
            raise TrainingStopped(f"{said} ({limit}; its node's Ray logs say more).") from None
        if killed is None and cause_of(error, (*DIED, EngineRestarted)) is None:
            ray.kill(engine, no_restart=False)  # vLLM's process died, the actor did not
        meanwhile = "the others answer its prompts until then" if self.serving else "its prompts wait for it"
        print(f"Warning: {said}. It is being restarted; {meanwhile}.", flush=True)

    def recover(self, error: Exception) -> None:
        """Return if an engine's failure caused ``error``, else raise it; the list of engines may be empty afterwards.

        Raises:
            TrainingStopped: as :meth:`check`.
        """
        died = isinstance(error, DIED) and not isinstance(error, RayTaskError)  # not an actor that the engine asked
        if not self.check() and not died and cause_of(error, (EngineRestarted, EngineDeadError)) is None:
            raise error

    def wait_for_lost(self) -> None:
        """Wait until the lost engines have started again, and so sleep: a trainer on the same GPUs needs the memory.

        Raises:
            Restartable: an engine did not start.
        """
        self.check()
        if lost := [engine for engine in self._all if engine not in self.serving]:
            wait_for_engines(lost)

    def bring_back(self, policy: Any) -> None:
        """Have the lost engines rejoin the group for weight transfers; the weights have to be sent afterwards.

        Args:
            policy: group of the policy's actors.

        Raises:
            TrainingStopped: an engine did not restart.
        """
        lost = [engine for engine in self._all if engine not in self.serving]
        if not lost:
            return
        began = time.monotonic()
        ranks = policy._actor_handlers
        ray.get([rank.__ray_call__.remote(lambda actor: actor.trainer.rejoin_engines()) for rank in ranks])
        self.serving[:] = self._all
        for engine in lost:  # noted of one that was counted as lost meanwhile
            self._killed.pop(self._all.index(engine), None)
        numbers = ", ".join(str(self._all.index(engine)) for engine in lost)
        print(f"vLLM engines {numbers} are back, after {time.monotonic() - began:.0f} s of waiting.", flush=True)


def kill_hanging(
    engines: Sequence[Any],
    stall_timeout: float,
    note: Callable[[int, str], None],
    serves: Callable[[Any], bool] = lambda engine: True,
    death: type[Exception] | tuple[()] = (),
) -> None:
    """From now on, kill engines that do not answer, so that whoever waits for them learns of it.

    Args:
        stall_timeout: seconds without an answer; with 0, no engine is killed.
        note: called before an engine is killed, with its number and what to say of it.
        serves: whether an engine is expected to answer.
        death: an engine that answers with this error is killed at once.
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
