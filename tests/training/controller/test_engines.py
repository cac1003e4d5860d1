"""Engines that die or hang leave the list of those that serve, come back with a new group for weights, and may do so
only so often. The engines are stand-ins; Ray's part is tested in tests/e2e/test_stop.py.
"""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.errors import TrainingStopped, last_error
from openrlhf_gtpo.training.controller import engines as module
from openrlhf_gtpo.training.controller.engines import Engines, kill_hanging
from openrlhf_gtpo.training.features.guide.guide import Guide
from openrlhf_gtpo.training.rollout.rollout_actor import EngineRestarted
from tests.support.fake_engines import guide_arguments

NEVER = object()


class Engine:
    """An engine's handle. ``state`` is what its calls raise, None if it serves, or NEVER if it does not answer."""

    def __init__(self) -> None:
        self.state: Any = None
        self.serves = SimpleNamespace(remote=lambda: (self, self._state))

    def _state(self) -> Any:
        return self.state


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch, brief_waits: None) -> Iterator[list[Engine]]:
    """The engines that were killed, under a Ray that has a result at once or never; killed engines are being started.
    The thread that watches engines ends with the test: later it would ask, and thereby start, the real Ray."""
    found: list[Engine] = []
    over, before = threading.Event(), threading.enumerate()

    def get(ref: Any, timeout: float = 0) -> None:
        for _, state in ref if isinstance(ref, list) else [ref]:
            failure = state()
            if failure is not None:
                raise failure

    def kill(engine: Engine, no_restart: bool) -> None:
        assert not no_restart
        found.append(engine)
        engine.state = ActorUnavailableError("it is being started", None)

    def wait(refs: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        if over.is_set():
            raise SystemExit  # ends the watching thread silently
        return [ref for ref in refs if ref[1]() is not NEVER], [ref for ref in refs if ref[1]() is NEVER]

    stand_in = SimpleNamespace(get=get, kill=kill, wait=wait, exceptions=ray.exceptions)
    monkeypatch.setattr(module, "ray", stand_in)
    yield found
    over.set()
    for thread in set(threading.enumerate()) - set(before):
        thread.join(timeout=600)
        assert not thread.is_alive()


def task_error(cause: Exception) -> Exception:
    """``cause`` as Ray hands it on when an actor's method raised it."""
    return ray.exceptions.RayTaskError("serves", "Traceback ...", cause).as_instanceof_cause()


def policy(rejoin: Callable[[], None]) -> Any:
    def call(function: Any) -> Any:
        function(SimpleNamespace(trainer=SimpleNamespace(rejoin_engines=rejoin)))
        return None, lambda: None

    return SimpleNamespace(_actor_handlers=[SimpleNamespace(__ray_call__=SimpleNamespace(remote=call))] * 2)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("state", "kills"),
    [
        (ActorUnavailableError("it is being started", None), False),
        (OutOfMemoryError("Ray's memory monitor ended it"), False),
        (task_error(EngineRestarted("it has old weights")), False),
        (task_error(EngineDeadError()), True),  # vLLM's process died, but its actor did not
    ],
    ids=["died", "out-of-memory", "restarted", "core-died"],
)
def test_an_engine_that_died_is_left_out_and_comes_back_with_the_next_weights(
    state: Exception, kills: bool, killed: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    serving = [Engine(), Engine()]
    zero, one = serving
    engines = Engines(serving, max_restarts=1, stall_timeout=0)
    assert engines.check() == 0
    one.state = state
    engines.recover(state)
    assert serving == [zero] and engines.restarts == 1 and killed == [one] * kills
    assert "vLLM engine 1 of 2 (counted from 0) died: " in capsys.readouterr().out
    engines.recover(state)  # from another of its calls
    assert serving == [zero] and engines.restarts == 1

    joined: list[int] = []
    engines.bring_back(policy(lambda: joined.append(len(serving))))
    assert joined == [1, 1], "every rank of the policy, before it serves"
    assert serving == [zero, one]
    one.state = None
    assert engines.check() == 0
    engines.bring_back(None)  # nobody to bring back


CAUSE = "ValueError: No available memory for the cache blocks: 0.3 GB; lower gpu_memory_utilization."
FRAMES = "".join(
    f'  File "vllm/v1/engine/part_{n}.py", line {n}, in part\n    return self.part_{n}()\n' for n in range(20)
)
USERS = "Top 10 memory users: PID MEM(GB) COMMAND " + " ".join(
    f"{n} 8.47 ray::PolicyActor" + 80 * "y" for n in range(10)
)
DIED = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
DIED += "Worker unexpectedly exits with a connection error code 2. End of file. There are some potential root causes. "


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"\x1b[36mray::RolloutActor.serves()\x1b[39m (pid=7, ip=10.0.0.1)\n{FRAMES}{CAUSE}", CAUSE),
        (f"The actor died because of an error raised in its creation task, ray::A()\n{FRAMES}{CAUSE}\n", CAUSE),
        (f"ray::A.f() (pid=7)\n{FRAMES}RayTaskError: ray::B.g()\n{FRAMES}{CAUSE}", CAUSE),
        (f"ray::A.f() (pid=7)\n{FRAMES}ValueError: two\nlines", "ValueError: two lines"),
        (f"The actor died unexpectedly before finishing this task.\n\tclass_name: A\n\tpid: 7\n{DIED}", DIED.strip()),
        ("it is being started\n", "it is being started"),
        ("", "RuntimeError"),
        (
            f"1 worker(s) were killed. {'x' * 700}; {USERS}",
            f"{f'1 worker(s) were killed. {700 * chr(120)}':.600}{USERS}",
        ),
    ],
)
def test_a_death_is_told_in_its_last_sentence_and_not_in_the_middle_of_a_traceback(text: str, said: str) -> None:
    assert last_error(RuntimeError(text), 600) == said


def test_what_the_prompts_of_a_dead_engine_wait_for(killed: list[Engine], capsys: pytest.CaptureFixture[str]) -> None:
    for count, meanwhile in ((1, "its prompts wait"), (2, "the others answer its prompts meanwhile")):
        serving = [Engine() for _ in range(count)]
        serving[0].state = task_error(EngineDeadError())
        assert Engines(serving, max_restarts=1, stall_timeout=0).check() == 1
        assert f"Restarting it; {meanwhile}." in capsys.readouterr().out


def test_a_trainer_on_the_same_gpus_waits_until_a_lost_engine_has_started(
    killed: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = [Engine(), Engine()]
    zero, one = serving
    engines, waited = Engines(serving, max_restarts=1, stall_timeout=0, sleep=True), []
    monkeypatch.setattr("openrlhf_gtpo.training.controller.engines.wait_for_engines", waited.append)
    engines.wait_for_lost()
    assert not waited
    one.state = task_error(EngineRestarted("it has old weights"))
    engines.wait_for_lost()
    assert waited == [[one]] and serving == [zero], "which gets its weights with the next transfer"


@pytest.mark.parametrize("limit", [0, 1])
def test_one_engine_too_many_stops_the_run_in_one_sentence(limit: int, killed: list[Engine]) -> None:
    serving = [Engine() for _ in range(3)]
    last = serving[2]
    engines = Engines(serving, max_restarts=limit, stall_timeout=0)
    if limit:
        serving[0].state = ActorUnavailableError("it is being started", None)
        engines.check()
    last.state = task_error(EngineDeadError())
    with pytest.raises(
        TrainingStopped, match=rf"^vLLM engine 2 of 3 .* died: .* \(--train.max_restarts {limit} "
    ) as stop:
        engines.check()
    assert "\n" not in str(stop.value) and not killed


@pytest.mark.parametrize("cause", [TrainingStopped("no reward"), ActorDiedError(), OutOfMemoryError("low on memory")])
def test_what_no_engine_has_raised_is_handed_on(cause: Exception, killed: list[Engine]) -> None:
    """Such as the death of an actor that an agent asked: the prompt would kill the next one too."""
    engines = Engines([Engine()], max_restarts=3, stall_timeout=0)
    error = task_error(cause)
    with pytest.raises(type(cause)) as raised:
        engines.recover(error)
    assert raised.value is error


def test_a_slow_engine_is_not_dead_and_a_hanging_one_is_killed(killed: list[Engine]) -> None:
    serving = [Engine(), Engine()]
    zero, one = serving
    one.state = NEVER
    assert Engines(list(serving), max_restarts=1, stall_timeout=0).check() == 0 and not killed
    engines = Engines(serving, max_restarts=0, stall_timeout=0.1)
    time.sleep(0.5)
    assert not killed, "engines may still be loading"
    engines.watch()
    until(lambda: bool(killed))
    assert killed == [one]
    with pytest.raises(TrainingStopped, match=r"^vLLM engine 1 of 2 \(counted from 0\) did not answer for 0.1 s \("):
        engines.check()


@pytest.mark.parametrize("stall_timeout", [0, 60])
def test_an_engine_whose_vllm_process_died_starts_again_before_anybody_needs_it(
    stall_timeout: float, killed: list[Engine], capsys: pytest.CaptureFixture[str]
) -> None:
    serving = [Engine(), Engine()]
    zero, one = serving
    engines = Engines(serving, max_restarts=1, stall_timeout=stall_timeout)
    engines.watch()
    one.state = task_error(EngineDeadError())
    until(lambda: bool(killed))
    one.state = task_error(EngineDeadError())  # like an answer that was under way
    time.sleep(0.2)
    assert engines.check() == 1 and killed == [one], "once"
    assert serving == [zero]
    assert "vLLM engine 1 of 2 (counted from 0) died: EngineCore" in capsys.readouterr().out
    engines.bring_back(policy(lambda: None))
    until(lambda: len(killed) == 2)  # since it is watched again


def test_a_hanging_engine_of_the_guide_is_killed_with_a_word(killed: list[Engine], capsys: Any) -> None:
    """Whoever waits for the engine hears of a death, as in tests/training/test_guide.py."""
    engines = [Engine(), Engine()]
    engines[1].state = NEVER
    kill_hanging(engines, 0.1, Guide(engines, guide_arguments(0.5)).hangs)
    until(lambda: bool(killed))
    assert killed[0] is engines[1]
    assert "Warning: engine 1 of the guide did not answer for 0.1 s; killing it." in capsys.readouterr().out
