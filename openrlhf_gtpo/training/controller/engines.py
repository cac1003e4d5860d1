"""The run's vLLM engines as its controller sees them, and what happens when one dies or hangs.

Engines are asked on one thread (``ask``), whether or not a step trains meanwhile; the controller sends weights.

1. A call to an engine fails, or ``watch`` kills an engine that hangs. The sampler calls ``recover``: the engine leaves
   the list of those that serve, and its requests go to the others (``Sampler.in_place_of``). Ray restarts it
   (``max_restarts`` of its actor) on the same GPUs and behind the same handle. One too many ends the run.
2. If none is left, the thread waits for weights. The controller, which waits for an answer, sends them and waits again
   (``Controller.answered``).
3. A restarted engine has the weights of the model's checkpoint and refuses to sample from them (``EngineRestarted``).
   The next ``send_weights`` forms a new group with it, and proves by checksums that the weights arrived.
4. If an engine dies during a transfer, the run ends.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import ray
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from ray.exceptions import RayError, RayTaskError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped, last_error
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.controller.failures import DIED, cause_of
from openrlhf_gtpo.training.controller.heartbeat import Phases
from openrlhf_gtpo.training.rollout.rollout_actor import EngineRestarted

_ANSWER = 10.0  # seconds for an engine to say that it serves; a slower one is not taken for dead
_LOOK_EVERY = 1.0

T = TypeVar("T")


class Engines:
    """Has the engines asked, and keeps track of which serve, with which weights.

    Args:
        serving: handles of all engines. Updated in place, so that whoever holds the list sees only those that serve.
        max_restarts: engines that may be lost before the run stops.
        stall_timeout: seconds without an answer after which an engine is killed, or 0.
        sleep: whether engines sleep while the trainer uses their GPUs (``--vllm.enable_sleep``).
        pause: whether they go on with new weights between two tokens (``--train.partial_rollout_enable``).

    Attributes:
        restarts: engines lost so far.
        version: the step whose weights they have.
        lack_weights: whether the thread waits for weights, because no engine is left.
        changed: notified when that changes, and after each call on the thread.
    """

    def __init__(
        self, serving: list[Any], max_restarts: int, stall_timeout: float, sleep: bool = False, pause: bool = False
    ) -> None:
        self.serving = serving
        self.restarts = self.version = 0
        self.changed, self.lack_weights = threading.Condition(), False
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._sleep, self._pause = sleep, pause
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

    def ask(self, call: Callable[[], T]) -> "Future[T]":
        """Have ``call``, which asks engines, made on the thread for that, after the calls before it."""
        answer: Future[T] = Future()

        def make() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # whoever waits for the answer raises it
                answer.set_exception(error)
            with self.changed:
                self.changed.notify_all()

        self._calls.put(make)
        if self._thread is None:
            self._thread = threading.Thread(target=self._make_calls, daemon=True)
            self._thread.start()
        return answer

    def _make_calls(self) -> None:
        while True:
            self._calls.get()()

    def wait(self, answer: "Future[Any]") -> bool:
        """Wait for ``answer``, or the error in its place. False if it does not come before weights are sent."""
        with self.changed:
            self.changed.wait_for(lambda: answer.done() or self.lack_weights)
            return answer.done()

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
        """On the thread: return when engines can be asked again if the failure of one caused ``error``, else raise it.

        Raises:
            TrainingStopped: as :meth:`check`.
        """
        died = isinstance(error, DIED) and not isinstance(error, RayTaskError)  # not an actor that the engine asked
        if not self.check() and not died and cause_of(error, (EngineRestarted, EngineDeadError)) is None:
            raise error
        if self.serving:
            return
        with self.changed:
            self.lack_weights = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.lack_weights)
        if self._sleep:  # only their weights are awake
            batch_vllm_engine_call(self.serving, "wake_up")

    def wait_for_lost(self) -> None:
        """Wait until lost engines have started again, and so sleep, if a trainer on the same GPUs needs the memory.

        Raises:
            Restartable: an engine did not start.
        """
        if not (self._max_restarts and self._sleep):
            return
        self.check()
        if lost := [engine for engine in self._all if engine not in self.serving]:
            wait_for_engines(lost)

    def send_weights(self, policy: Any, version: int, phases: Phases) -> None:
        """Send the weights of step ``version``, also to the engines that were restarted.

        Args:
            policy: group of the policy's actors.
            phases: is shown how far this has come.

        Raises:
            TrainingStopped: more engines died than the run allows.
            ray.exceptions.RayError: an engine died during the transfer.
        """
        self.check()
        try:
            phases.wait()  # an engine may take as long as it needs to start
            self.bring_back(policy)
            phases.show(names.BROADCAST)
            if self._sleep:  # the key-value cache follows when engines sample
                batch_vllm_engine_call(self.serving, "wake_up", tags=["weights"])
            if self._pause:  # between two tokens; they go on if all have the weights
                batch_vllm_engine_call(self.serving, "pause_generation")
            ray.get(policy.async_run_method(method_name="broadcast_to_vllm", version=version))
            if self._pause:
                batch_vllm_engine_call(self.serving, "resume_generation")
        except RayError:
            self.check()  # which names the engine, if the run stops because of it
            raise
        with self.changed:
            self.version, self.lack_weights = version, False
            self.changed.notify_all()

    def bring_back(self, policy: Any) -> None:
        """Have the lost engines rejoin the group for weight transfers; the weights have to be sent afterwards.

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
