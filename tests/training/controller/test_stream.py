"""Weights in flight (``--train.partial_rollout_enable``): in a run without Ray, each prompt is trained on once, no
token is older than it may be, and a run goes on from any of its checkpoints.
"""

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training.controller.stream import Stream
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rollout.packed import pack_json, unpack_json
from openrlhf_gtpo.training.rows import Dropped, Row
from tests.support.controllers import controller, engine_handle, run_arguments
from tests.support.fake_engines import Remote
from tests.training.controller import test_rollouts
from tests.training.controller.test_rollouts import Actors

ARGV = ("--train.num_episodes", "2", "--ckpt.save_steps", "1", "--algo.advantage.is_correction_level", "token")
ARGV += ("--logger.entropy_enable", "--rollout.entropy", "actor", "--train.async_enable")
IN_FLIGHT = ("--train.partial_rollout_enable", "--algo.dynamic_filtering_range", "0.1", "0.9")
BATCH, GROUP = 4, 3


class Engine:
    """An engine that samples two tokens of each response, while weights change.

    Attributes:
        version: of its weights.
        paused: whether it has been told to pause.
        asked: (prompt's number, version) of each request.
        until: for a prompt's number, the version with which its request ends; others end after a moment.
    """

    def __init__(self) -> None:
        self.version, self.paused = 0, False
        self.asked: list[tuple[int, int]] = []
        self.until: dict[int, int] = {}
        self._random = random.Random(1)

    def handle(self) -> Any:
        found = engine_handle()
        found.sample = SimpleNamespace(remote=self.sample)
        found.pause_generation = SimpleNamespace(remote=lambda: self._pause(True))
        found.resume_generation = SimpleNamespace(remote=lambda: self._pause(False))
        return found

    def _pause(self, paused: bool) -> None:
        self.paused = paused

    def sample(self, request: Any, *given: Any) -> "Answer":
        self.asked.append((request.number, self.version))
        return Answer(self, request, self.until.get(request.number, 0), self._random.uniform(0, 0.03))


class Answer:
    """A reference to what ``engine`` will answer, with weights of version ``until`` at least."""

    def __init__(self, engine: Engine, request: Any, until: int, seconds: float) -> None:
        self.engine, self.request, self.until = engine, request, until
        self.begun, self.due = engine.version, time.monotonic() + seconds

    def is_ready(self) -> bool:
        return time.monotonic() > self.due and self.engine.version >= self.until and not self.engine.paused

    def __call__(self) -> list[Row]:
        mask, number = np.array([False, True, True]), self.request.number
        versions = np.array([-1, self.begun, self.engine.version], dtype=np.int32)
        tokens, log_probs = np.array([1, 2, 3]), np.zeros(3, np.float32)
        rewards = [int(number % 5 and place > 0) for place in range(self.request.samples)]
        label = self.request.label
        return [
            Row(self.request.prompt, label, number, tokens, mask, log_probs, reward, None, versions=versions)
            for reward in rewards
        ]


class Run:
    """A run over ``prompts`` prompts.

    Attributes:
        trained: of each step, the numbers of its prompts.
        ages: of each step, those of its tokens.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        prompts: int,
        *argv: str,
        loaded: Any = None,
        held_out: int = 0,
    ) -> None:
        argv += (*ARGV, *IN_FLIGHT, *(("--ckpt.load_enable",) if loaded else ()))
        self.args = run_arguments(folder, *argv, estimator="group_norm", samples=GROUP)
        self.engine = Engine()
        self.actors = Actors(loaded)
        self.actors.broadcast_to_vllm = self.sent  # type: ignore[method-assign]
        self.actors.fit = self.fitted  # type: ignore[method-assign]
        self.controller = controller(monkeypatch, self.args, self.actors, prompts, held_out, [self.engine.handle()])
        self.controller.engines.watch = lambda: None  # whose thread would outlive the test, and ask Ray
        monkeypatch.setattr(ray, "wait", self.wait)
        self.trained: list[list[int]] = []
        self.ages: list[list[int]] = []
        make = self.controller.maker.make

        def made(rows: list[Row], own: bool = True) -> Any:
            self.trained.append([row.number for row in rows[::GROUP]])
            self.ages.append([int(self.controller.step - version) for row in rows for version in row.versions[1:]])
            assert all(row.label in (None, row.prompt) for row in rows), "a prompt has another's label"
            return make(rows, own)

        self.controller.maker.make = made

    def sent(self, version: int) -> None:
        assert self.engine.paused, "weights change while a token is sampled"
        time.sleep(0.01)
        self.engine.version = version

    def fitted(self, kl_ctl: float) -> dict[str, Any]:
        time.sleep(0.02)
        return type(self.actors).fit(self.actors, kl_ctl)

    @staticmethod
    def wait(refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
        ends = time.monotonic() + (timeout or 0)
        while True:
            ready = [ref for ref in refs if not isinstance(ref, Answer) or ref.is_ready()][:num_returns]
            if len(ready) == num_returns or time.monotonic() > ends:
                return ready, [ref for ref in refs if ref not in ready]
            time.sleep(0.001)

    def metrics(self) -> list[dict[str, Any]]:
        [rows] = read_runs(self.args.logger.metrics_path)
        return [row for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize("prompts", [16, 18], ids=["whole rollouts", "a short last one"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_each_prompt_is_trained_once_and_no_token_is_too_old(
    staleness: int, prompts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, prompts, "--train.max_staleness", f"{staleness}")
    run.controller.fit()
    assert sorted(number for step in run.trained for number in step) == list(range(2 * prompts))
    per_episode = -(-prompts // BATCH)
    assert len(run.trained) == 2 * per_episode
    assert sorted(sum(run.trained[:per_episode], [])) == list(range(prompts)), "episodes are mixed"
    ahead = (staleness + 1) // 2
    assert ahead <= max(map(max, run.ages)) <= staleness and min(map(min, run.ages)) == 0
    # Nobody is asked twice; before anything is trained, for as many as are ahead of it.
    assert sorted(number for number, _ in run.engine.asked) == list(range(2 * prompts))
    assert len([version for _, version in run.engine.asked if version == 0]) == BATCH * (1 + ahead)
    assert not run.engine.paused
    for row, ages in zip(run.metrics(), run.ages, strict=True):
        assert (row[names.STALENESS_MEAN], row[names.STALENESS_MAX]) == (np.mean(ages), max(ages))
        spreads = [abs(first - last) for first, last in zip(ages[:: 2 * GROUP], ages[1 :: 2 * GROUP], strict=True)]
        assert row[names.STALENESS_SPREAD] == np.mean(spreads)


@pytest.mark.parametrize(("staleness", "until"), [(1, 0), (1, 1), (2, 1), (2, 2), (4, 3), (4, 4)])
def test_a_step_waits_for_a_group_that_the_next_one_could_not_take(
    staleness: int, until: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompt 1 is asked with the first weights and answered with those of ``until``, up to the last that may."""
    run = Run(monkeypatch, tmp_path, 24, "--train.max_staleness", f"{staleness}")
    run.engine.until = {1: until}
    run.controller.fit()
    assert sorted(number for step in run.trained for number in step) == list(range(48))
    assert until <= next(place for place, numbers in enumerate(run.trained) if 1 in numbers) <= staleness
    assert sorted(number for number, _ in run.engine.asked) == list(range(48))
    assert max(map(max, run.ages)) <= staleness


@pytest.mark.parametrize("staleness", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(8))
def test_the_choice_leaves_what_later_steps_can_take(seed: int, staleness: int) -> None:
    """Whatever is complete when, each step takes as many groups as it may, and none of them is too old."""
    chance = random.Random(seed)
    sampler = SimpleNamespace(per_rollout=BATCH)
    engines: Any = SimpleNamespace(version=0)
    stream = Stream(sampler, None, engines, lambda steps: True, staleness)
    stream._end, drawn = 1, 0

    def draw() -> Any:
        nonlocal drawn
        drawn += 1
        return SimpleNamespace(number=drawn - 1) if drawn <= 50 else None

    sampler.draw, stream._ask = draw, lambda prompt: setattr(prompt, "version", engines.version)
    taken: list[Any] = []
    while len(taken) < 50:
        stream._draw_ahead()
        while (chosen := stream._chosen()) is None:
            [*waiting] = [prompt for prompt in stream._prompts.values() if prompt not in stream._complete]
            stream._complete.append(chance.choice(waiting))  # if none is left, the step waits for ever
        assert len(chosen) == min(BATCH, 50 - len(taken))
        assert all(engines.version - prompt.version <= staleness for prompt in chosen)
        for prompt in chosen:
            stream._complete.remove(prompt)
            taken.append(stream._prompts.pop(prompt.request.number))
        engines.version += 1
    assert sorted(prompt.request.number for prompt in taken) == list(range(50))
    overtaken = any(earlier.version > later.version for earlier, later in pairwise(taken))
    assert overtaken == (staleness > 1), "with all that may be in flight, it is first in, first out"


@pytest.mark.parametrize("flags", [(), ("--algo.dynamic_filtering_enable",)], ids=["all", "filtered"])
def test_a_run_goes_on_from_any_checkpoint(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No prompt is lost, none trained twice, and each keeps its label."""
    prompts = 18
    whole = Run(monkeypatch, tmp_path / "whole", prompts, *flags)
    wanted = [number for number in range(2 * prompts) if not (flags and number % 5 == 0)]
    whole.controller.fit()
    assert sorted(number for step in whole.trained for number in step) == wanted
    assert len(whole.actors.saved) == len(whole.trained)
    in_flight = 0
    for steps, (tag, checkpoint) in enumerate(whole.actors.saved.items(), 1):
        states = checkpoint["client_states"]
        in_flight = max(in_flight, len(unpack_json(states["prompts_in_flight"]["prompts"])))
        again = Run(monkeypatch, tmp_path / tag, prompts, *flags, loaded=states)
        if steps < len(whole.trained):
            again.controller.fit()
        found = [number for step in (*whole.trained[:steps], *again.trained) for number in step]
        assert sorted(found) == wanted, tag
        assert max(map(max, again.ages), default=0) <= again.args.train.max_staleness
    assert in_flight > BATCH


@pytest.mark.parametrize("is_old", [False, True], ids=["today's", "an earlier version's"])
def test_what_is_asked_again_keeps_its_templates_variables(
    is_old: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the data have another text for the row today, as with a template that writes the date."""
    whole = Run(monkeypatch, tmp_path / "whole", 18)
    whole.controller.prompts.dataset.variables = {str(row): {"tags": [row]} for row in range(18)}
    whole.controller.fit()
    states = whole.actors.saved["global_step1"]["client_states"]
    kept = unpack_json(states["prompts_in_flight"]["prompts"])
    if is_old:
        states["prompts_in_flight"]["prompts"] = pack_json([entry[:6] for entry in kept])
    again = Run(monkeypatch, tmp_path / "again", 18, loaded=states)
    again.controller._load()
    kept_again = unpack_json(again.controller.rollouts.state()["prompts_in_flight"]["prompts"])
    assert [entry[:6] for entry in kept_again] == [entry[:6] for entry in kept]
    assert {entry[4] for entry in kept} == {0, 1}, "weights of both steps have been asked"
    requests = [prompt.request for prompt in again.controller.rollouts._prompts.values()]
    assert len(requests) == len(kept) > 0
    assert all(each.variables == ({} if is_old else {"tags": [int(each.prompt)]}) for each in requests)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (4, 0), (0, 3)])
def test_a_run_goes_on_with_another_staleness(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is older than the run may now have is trained on all the same."""
    whole = Run(monkeypatch, tmp_path / "whole", 18, "--train.max_staleness", f"{before}")
    whole.controller.fit()
    for steps, (tag, checkpoint) in enumerate([*whole.actors.saved.items()][:-1], 1):
        states = checkpoint["client_states"]
        states["prompts_in_flight"]["counts"].append(0)  # as an earlier version did, of groups asked again
        again = Run(monkeypatch, tmp_path / tag, 18, "--train.max_staleness", f"{after}", loaded=states)
        again.controller.fit()
        found = [number for step in (*whole.trained[:steps], *again.trained) for number in step]
        assert sorted(found) == list(range(36)), tag


def test_only_a_run_of_its_kind_goes_on_with_prompts_in_flight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Run(monkeypatch, tmp_path / "whole", 8)
    whole.controller.fit()
    states = whole.actors.saved["global_step1"]["client_states"]
    with pytest.raises(TrainingStopped, match="--train.partial_rollout_enable"):
        test_rollouts.Run(monkeypatch, tmp_path / "ahead", 8, *test_rollouts.AHEAD, loaded=states).controller.fit()
    ahead = test_rollouts.Run(monkeypatch, tmp_path / "other", 8, *test_rollouts.AHEAD)
    ahead.controller.fit()
    states = ahead.actors.saved["global_step1"]["client_states"]
    with pytest.raises(TrainingStopped, match="leave that flag out"):
        Run(monkeypatch, tmp_path / "again", 8, loaded=states).controller.fit()


def test_without_staleness_it_is_the_synchronous_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Number by number, times and what only asynchronous runs log aside."""
    argv = (*test_rollouts.AHEAD, "--train.partial_rollout_enable", "--train.max_staleness", "0")
    in_flight, in_turn = (
        test_rollouts.Run(monkeypatch, tmp_path / name, 18, *flags)
        for name, flags in (("in flight", argv), ("turns", ()))
    )
    for run in (in_flight, in_turn):
        run.controller.fit()
    assert in_flight.trained == in_turn.trained
    for ours, theirs in zip(in_flight.metrics(), in_turn.metrics(), strict=True):
        for name, value in theirs.items():
            if not name.startswith(("timing/", "tokens_per_second", "time", "memory")):
                np.testing.assert_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("prompts", "staleness", "filtered"),
    [
        (8, 1, range(8)),
        (8, 0, range(4, 8)),
        (9, 0, range(8, 9)),
        (12, 1, range(4, 12)),
        (16, 1, range(8, 15)),
        (16, 4, range(4, 16)),
    ],
    ids=str,
)
def test_the_next_episode_is_drawn_if_the_rest_of_one_is_filtered(
    prompts: int, staleness: int, filtered: range, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of both episodes; a run without Ray would wait for ever."""
    call = Answer.__call__

    def answer(self: Answer) -> list[Row]:
        rows = call(self)
        differ = self.request.number % prompts not in filtered
        return [replace(row, reward=int(differ and place > 0)) for place, row in enumerate(rows)]

    monkeypatch.setattr(Answer, "__call__", answer)
    run = Run(
        monkeypatch, tmp_path, prompts, "--algo.dynamic_filtering_enable", "--train.max_staleness", f"{staleness}"
    )
    wanted = [number for number in range(2 * prompts) if number % prompts not in filtered]
    with nullcontext() if wanted else pytest.raises(TrainingStopped, match="No step was trained"):
        run.controller.fit()
    assert sorted(number for step in run.trained for number in step) == wanted
    assert len(run.trained) == 2 * -(-len(wanted) // 2 // BATCH)


@pytest.mark.parametrize("failures", [4, 5])
def test_a_tenth_of_what_is_in_flight_may_fail(failures: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of all that engines were asked for, not of the next step's prompts: 40, and not 10."""
    sizes = ("--rollout.batch_size", "10", "--rollout.vllm_generate_batch_size", "10")
    run = Run(monkeypatch, tmp_path, 64, "--train.max_staleness", "5", "--train.max_restarts", "1", *sizes)
    control, call, failed = run.controller, Answer.__call__, set()

    def answer(self: Answer) -> Any:
        if self.request.number >= failures:
            return call(self)
        failed.add(self.request.number)
        return Dropped("no reward")

    monkeypatch.setattr(Answer, "__call__", answer)
    monkeypatch.setattr(Answer, "is_ready", lambda self: self.request.number < failures or len(failed) == failures)
    with nullcontext() if failures == 4 else pytest.raises(TrainingStopped, match="failed for 5 prompts"):
        control.fit()
    if failures == 5:  # a run that goes on from here may drop as many again
        assert control.rollouts.state()["prompts_in_flight"]["counts"][-1] == 0


def test_a_response_that_hangs_ends_the_sign_of_life(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines and ranks answer, and the step waits for one response, longer than a reward's three tries may take."""
    flags = ("--train.stall_timeout", "60", "--train.max_restarts", "1")
    beats: list[Callable[[], bool] | None] = []
    monkeypatch.setattr(Heartbeat, "beat", lambda self, going_on=None: beats.append(going_on))
    run = Run(monkeypatch, tmp_path, 16, *flags)
    run.engine.until = {1: 2}  # a step waits for it with weights of the first
    asked = run.wait

    def wait(refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        going_on, rollouts = beats[-1], run.controller.rollouts
        waiting = [ref.request.number for ref in refs if isinstance(ref, Answer)] == [1]
        if waiting and run.engine.version == 1 and going_on is not None:
            for waited, goes_on in ((0, True), (179, True), (181, False)):
                rollouts._waited = waited
                assert going_on() == goes_on
            raise TrainingStopped("enough")
        return asked(refs, num_returns, timeout)

    monkeypatch.setattr(ray, "wait", wait)
    with pytest.raises(TrainingStopped, match="enough"):
        run.controller.fit()


class Audited(ControllerFeature):
    """Audits some steps, and so wants all of their tokens from the policy that trains on them."""

    audits = (1, 4, 5)

    def __init__(self, run: Any) -> None:
        super().__init__(run.args)
        self.run = run

    def may_sample_ahead(self, steps: int = 1) -> bool:
        return not any(self.run.step + 1 + later in self.audits for later in range(steps + 1))


def test_an_audited_step_trains_on_its_own_policys_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, 48, "--train.max_staleness", "3")
    run.controller.features.append(Audited(run.controller))
    run.controller.fit()
    oldest = [max(ages) for ages in run.ages]
    assert len(oldest) == 24 and [oldest[step - 1] for step in Audited.audits] == [0, 0, 0]
    assert oldest[5] == 0 and max(oldest) >= 2  # a gate may close at an audit, so that none is ahead of the next step


@pytest.mark.parametrize("dies", [1, 20, "after step 2"])
def test_with_no_engine_left_prompts_wait_for_weights(
    dies: int | str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The controller sends them, never the engines' thread: in the first step, in a later one, and if the last engine
    dies between a step and its evaluation."""
    argv = ("--eval.steps", "2", "--eval.dataset", "x", "--train.max_restarts", "1")
    run = Run(monkeypatch, tmp_path, 16, *argv, held_out=4)
    run.engine.until = {13: 3}  # which is in flight after step 2
    control, senders, dead = run.controller, [], threading.Event()
    engines, save, call, is_ready = control.engines, control.save, Answer.__call__, Answer.is_ready
    bring_back, sample = engines.bring_back, run.engine.sample
    [handle] = engines.serving

    def failing(*given: Any) -> None:
        if dead.is_set():
            raise ActorUnavailableError("it is being started", None)

    def brought_back(policy: Any) -> None:
        if not engines.serving:
            senders.append((threading.current_thread(), control.step))
            dead.clear()
        bring_back(policy)

    def asked(request: Any, *given: Any) -> Any:
        if len(run.engine.asked) == dies:
            dead.set()
        return sample(request, *given)

    def saved() -> None:
        save()
        if dies == f"after step {control.step}":
            dead.set()
            while not engines.lack_weights:  # the thread notices it
                time.sleep(0.001)

    monkeypatch.setattr(Answer, "__call__", lambda self: failing() or call(self))
    monkeypatch.setattr(Answer, "is_ready", lambda self: dead.is_set() or is_ready(self))
    handle.serves, handle.sample = Remote(failing), SimpleNamespace(remote=asked)
    engines.bring_back, control.save = brought_back, saved
    control.fit()
    assert sorted(number for step in run.trained for number in step) == list(range(32))
    [(sender, step)] = senders
    assert sender is threading.main_thread() and (dies == 20 or step == (0 if dies == 1 else 2))
    [rows] = read_runs(run.args.logger.metrics_path)
    assert [row["step"] for row in rows if row["kind"] == "eval"] == [2, 4, 6, 8]


@pytest.mark.parametrize("flags", [(), ("--algo.dynamic_filtering_enable",)], ids=["all", "filtered"])
def test_what_fails_on_the_thread_ends_the_run_after_the_step_in_progress(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """That step is logged and saved, no weights are sent, and a run goes on from it with what failed."""
    run = Run(monkeypatch, tmp_path, 16, *flags, "--train.max_staleness", "3")
    control, completed, fails, is_ready = run.controller, [], threading.Event(), Answer.is_ready
    monkeypatch.setattr(  # one that is in flight in step 2
        Answer, "is_ready", lambda self: fails.is_set() if self.request.number == 9 else is_ready(self)
    )
    kept, fit, publish = control.sampler.kept, run.actors.fit, control.saver.publish

    def failing(*given: Any) -> Any:
        if fails.is_set():
            raise TrainingStopped("enough")
        return kept(*given)

    def fitted(kl_ctl: float) -> Any:
        if len(run.trained) == 2:
            fails.set()
            while not control.rollouts.has_failed:
                time.sleep(0.01)
        return fit(kl_ctl)

    def published(wait: bool = False) -> None:
        completed.append(wait)
        publish(wait)

    control.sampler.kept, run.actors.fit, control.saver.publish = failing, fitted, published
    with pytest.raises(TrainingStopped, match="enough"):
        control.fit()
    assert completed[-1] is True
    assert [row["step"] for row in run.metrics()] == [1, 2] and run.engine.version == 1
    states = run.actors.saved["global_step2"]["client_states"]
    monkeypatch.setattr(Answer, "is_ready", is_ready)
    again = Run(monkeypatch, tmp_path / "again", 16, *flags, "--train.max_staleness", "3", loaded=states)
    again.controller.fit()
    found = sorted(number for step in (*run.trained, *again.trained) for number in step)
    assert found == [number for number in range(32) if not (flags and number % 5 == 0)]


def test_engines_do_not_go_on_after_a_transfer_that_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, 16)

    def sent(version: int) -> None:
        if version == 2:
            raise RuntimeError("half of the weights have arrived")
        run.sent(version)

    run.actors.broadcast_to_vllm = sent  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="half of the weights"):
        run.controller.fit()
    assert run.engine.paused and run.engine.version == 1
