"""A rank that dies ends the driver's wait."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import pytest
import ray

from openrlhf_gtpo.training.controller.failures import answering, deaths_noticed


class Rank:
    """Answers at once until it is dead. As with Ray's handles, ``__ray_ready__.remote()`` returns a reference."""

    def __init__(self) -> None:
        self.dead: Exception | None = None
        self.asked = 0
        self.__ray_ready__ = self

    def remote(self) -> "Answer":
        self.asked += 1
        return Answer(self)


class Answer:
    def __init__(self, rank: Rank) -> None:
        self.rank = rank


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(answer: Answer) -> None:
        if answer.rank.dead:
            raise answer.rank.dead

    monkeypatch.setattr(ray, "wait", lambda answers, **_: (answers, []))
    monkeypatch.setattr(ray, "get", get)


def _wait(condition: Any) -> None:
    deadline = time.monotonic() + 600
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)


DEATHS = (ray.exceptions.ActorDiedError(), ray.exceptions.OutOfMemoryError("Ray's memory monitor ended it"))


@pytest.mark.parametrize("interrupt", [signal.default_int_handler, signal.SIG_IGN])
@pytest.mark.parametrize("death", DEATHS, ids=["died", "out-of-memory"])
def test_a_dead_rank_ends_the_wait(death: Exception, interrupt: Any) -> None:
    """Even in a run that a script starts in the background, where the shell makes it ignore SIGINT."""
    ranks, before = [Rank(), Rank()], signal.signal(signal.SIGINT, interrupt)
    try:
        with pytest.raises(type(death)):
            with deaths_noticed(lambda: ranks, every=0.01):
                _wait(lambda: all(rank.asked > 1 for rank in ranks))
                ranks[1].dead = death
                _wait(lambda: False)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_what_a_signal_raises_comes_out_of_rays_get_as_it_is() -> None:
    """With a real Ray, whose ``get`` lets nothing but KeyboardInterrupt out of a signal handler."""
    program = """
import os, signal, sys, threading
import ray
from openrlhf_gtpo.training.controller.failures import raised_on

@ray.remote
def wait():  # for a CPU, of which there is none
    raise AssertionError

ray.init(num_cpus=0, include_dashboard=False, log_to_driver=False)
for error in (ValueError("a rank died"), SystemExit(143)):
    try:
        with raised_on(signal.SIGTERM, lambda: error):
            threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            ray.get(wait.remote())
    except (ValueError, SystemError) as raised:
        assert raised is error, raised
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 143, done.stderr


def test_ctrl_c_stays_what_it_is() -> None:
    with pytest.raises(KeyboardInterrupt), deaths_noticed(list, every=0.01):
        raise KeyboardInterrupt


def test_after_the_end_nobody_is_interrupted() -> None:
    """Not even if a rank and the run end in the same millisecond."""
    rank = Rank()
    for _ in range(100):
        rank.dead = False
        with suppress(ray.exceptions.ActorDiedError), deaths_noticed(lambda: [rank], every=0.001):
            rank.dead = ray.exceptions.ActorDiedError()
            time.sleep(0.001)
    time.sleep(0.05)


def test_ranks_have_to_answer_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, silent = [Rank(), Rank()], set[Rank]()
    monkeypatch.setattr(
        ray, "wait", lambda answers, **_: ([one for one in answers if one.rank not in silent], answers)
    )
    answered = answering(ranks)
    assert answered() and answered()
    silent.add(ranks[1])
    assert not answered() and not answered()
    assert [rank.asked for rank in ranks] == [2, 2]  # a rank that has not answered is not asked again
    silent.clear()
    assert answered()
    assert answering([])()
