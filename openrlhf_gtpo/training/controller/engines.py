"""The run's vLLM engines, and what happens when one dies or hangs.

One thread asks the engines (``ask``), also while a step trains. The controller sends weights.

1. A call to an engine fails, or ``watch`` kills an engine that hangs. The sampler calls ``recover``: the engine leaves
   the list ``serving``, and the other engines get its requests (``Sampler.in_place_of``). Ray restarts it
   (``max_restarts`` of its actor) on the same GPUs and behind the same handle. One loss too many ends the run.
2. If no engine is left, the thread waits for weights. The controller, which waits for an answer, sends them and waits
   again (``Controller.answered``).
3. A restarted engine has the weights of the model's checkpoint and refuses to sample from them (``EngineRestarted``).
   The next ``send_weights`` forms a new group with it and verifies by checksums that the weights arrived.
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

_ANSWER = 10.0  # seconds for an engine to say that it serves; a slower engine does not count as dead
_LOOK_EVERY = 1.0

T = TypeVar("T")


class Engines:
    """The engines: which of them serve, with which weights, and the thread that asks them.

    Args:
        serving: handles of all engines. Updated in place, so that other holders of the list see only serving engines.
        max_restarts: engines that the run may lose before it stops.
        stall_timeout: seconds without an answer after which an engine is killed; 0 for never.
        sleep: whether engines sleep while the trainer uses their GPUs (``--vllm.enable_sleep``).
        pause: whether new weights arrive between two tokens (``--train.partial_rollout_enable``).

    Attributes:
        restarts: engines lost so far.
        version: the step whose weights the engines have.
        lack_weights: whether the thread waits for weights, because no engine is left.
        changed: notified when ``lack_weights`` changes, and after each call on the thread.
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
        self._killed: dict[int, str] = {}  # reasons of engines killed but not yet counted as lost, by number
        self._stall_timeout = stall_timeout

    def watch(self) -> None:
        """Start killing engines that do not answer, or whose vLLM process died, so that they restart in time. To be
        called once all have loaded and joined the trainer's group."""
        if self._max_restarts or self._stall_timeout:
            limit = self._stall_timeout or math.inf
            kill_hanging(self._all, limit, self._killed.__setitem__, self._is_watched, EngineDeadError)

    def ask(self, call: Callable[[], T]) -> "Future[T]":
        """Queue ``call``, which asks engines, for their thread; returns its future result."""
        answer: Future[T] = Future()

        def make() -> None:
            try:
                answer.set_result(call())
            except BaseException as error:  # raised where the answer is awaited
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
        """Wait for ``answer`` or its error. False if it needs new weights first."""
        with self.changed:
            self.changed.wait_for(lambda: answer.done() or self.lack_weights)
            return answer.done()

    def _is_watched(self, engine: Any) -> bool:
        return engine in self.serving and self._all.index(engine) not in self._killed

    def check(self) -> int:
        """Take dead engines off the list; returns their number.

        Raises:
            TrainingStopped: the run has lost more than ``max_restarts`` engines.
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
            limit = f"--train.max_restarts {self._max_restarts} allows no more restarts"
            raise TrainingStopped(f"{said} ({limit}; see the Ray logs on its node).") from None
        if killed is None and cause_of(error, (*DIED, EngineRestarted)) is None:
            ray.kill(engine, no_restart=False)  # vLLM's process died, but not the actor
        meanwhile = "the others answer its prompts meanwhile" if self.serving else "its prompts wait"
        print(f"Warning: {said}. Restarting it; {meanwhile}.", flush=True)

    def recover(self, error: Exception) -> None:
        """On the thread: if an engine's failure caused ``error``, return once engines can be asked again; otherwise
        raise it.

        Raises:
            TrainingStopped: from :meth:`check`.
        """
        died = isinstance(error, DIED) and not isinstance(error, RayTaskError)  # not an actor that the engine called
        if not self.check() and not died and cause_of(error, (EngineRestarted, EngineDeadError)) is None:
            raise error
        if self.serving:
            return
        with self.changed:
            self.lack_weights = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: not self.lack_weights)
        if self._sleep:  # so far only their weights are awake
            batch_vllm_engine_call(self.serving, "wake_up")

    def wait_for_lost(self) -> None:
        """If a trainer on the same GPUs needs their memory, wait until lost engines have restarted and sleep.

        Raises:
            Restartable: an engine did not start.
        """
        if not (self._max_restarts and self._sleep):
            return
        self.check()
        if lost := [engine for engine in self._all if engine not in self.serving]:
            wait_for_engines(lost)

    def send_weights(self, policy: Any, version: int, phases: Phases) -> None:
        """Send the weights of step ``version`` to all engines, restarted ones included.

        Args:
            policy: group of the policy's actors.
            phases: shows the progress.

        Raises:
            TrainingStopped: more engines died than the run allows.
            ray.exceptions.RayError: an engine died during the transfer.
        """
        self.check()
        try:
            phases.wait()  # a restarting engine may take as long as it needs
            self.bring_back(policy)
            phases.show(names.BROADCAST)
            if self._sleep:  # the key-value cache wakes up when engines sample
                batch_vllm_engine_call(self.serving, "wake_up", tags=["weights"])
            if self._pause:  # between two tokens, until all have the weights
                batch_vllm_engine_call(self.serving, "pause_generation")
            ray.get(policy.async_run_method(method_name="broadcast_to_vllm", version=version))
            if self._pause:
                batch_vllm_engine_call(self.serving, "resume_generation")
        except RayError:
            self.check()  # names the engine, if the run stops because of it
            raise
        with self.changed:
            self.version, self.lack_weights = version, False
            self.changed.notify_all()

    def bring_back(self, policy: Any) -> None:
        """Let lost engines rejoin the group for weight transfers, before weights are sent.

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
        for engine in lost:  # may hold the reason of an engine that was counted as lost by now
            self._killed.pop(self._all.index(engine), None)
        numbers = ", ".join(str(self._all.index(engine)) for engine in lost)
        print(f"vLLM engines {numbers} are back after {time.monotonic() - began:.0f} s.", flush=True)


def kill_hanging(
    engines: Sequence[Any],
    stall_timeout: float,
    note: Callable[[int, str], None],
    serves: Callable[[Any], bool] = lambda engine: True,
    death: type[Exception] | tuple[()] = (),
) -> None:
    """Start a thread that kills engines which do not answer, so that calls to them fail instead of waiting.

    Args:
        stall_timeout: seconds without an answer; 0 kills no engine.
        note: called before an engine is killed, with its number and the reason.
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
            # Ask every engine that has no question open, and see who has answered.
            for number, engine in enumerate(engines):
                if number not in asked and serves(engine):
                    asked[number] = engine.serves.remote(), time.monotonic()
            refs = [ref for ref, _ in asked.values()]
            answered, _ = ray.wait(refs, num_returns=len(refs), timeout=_LOOK_EVERY) if refs else ([], [])
            # Kill the dead, and whoever has been silent for too long.
            for number, (ref, since) in list(asked.items()):
                if ref not in answered and time.monotonic() - since < stall_timeout:
                    continue
                del asked[number]
                wrong = what_is_wrong(ref, ref in answered)
                if wrong and serves(engines[number]):  # still: it may have been killed meanwhile
                    note(number, wrong)
                    ray.kill(engines[number], no_restart=False)
            time.sleep(_LOOK_EVERY)

    if stall_timeout:
        threading.Thread(target=watch, daemon=True).start()
