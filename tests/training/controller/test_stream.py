"""Weights in flight (``--train.partial_rollout_enable``): in a run without Ray, each prompt is trained on once, no
token is older than it may be, and a run goes on from any of its checkpoints.
"""

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rollout import groups
from openrlhf_gtpo.training.rollout.packed import unpack_json
from openrlhf_gtpo.training.rows import Row
from tests.support.controllers import controller, engine_handle, run_arguments
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
        until: for a prompt's number, the version with which its first request ends; others end after a moment.
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
        again = any(number == request.number for number, _ in self.asked)
        self.asked.append((request.number, self.version))
        return Answer(self, request, 0 if again else self.until.get(request.number, 0), self._random.uniform(0, 0.03))


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
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: int, *argv: str, loaded: Any = None
    ) -> None:
        argv += (*ARGV, *IN_FLIGHT, *(("--ckpt.load_enable",) if loaded else ()))
        self.args = run_arguments(folder, *argv, estimator="group_norm", samples=GROUP)
        self.engine = Engine()
        self.actors = Actors(loaded)
        self.actors.broadcast_to_vllm = self.sent  # type: ignore[method-assign]
        self.actors.fit = self.fitted  # type: ignore[method-assign]
        self.controller = controller(monkeypatch, self.args, self.actors, prompts, 0, [self.engine.handle()])
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
    assert max(map(max, run.ages)) == staleness and min(map(min, run.ages)) == 0
    if not staleness:  # otherwise one may be overtaken, and too old
        assert all(row[names.STALENESS_DROPPED] == 0 for row in run.metrics())
    # Before anything is trained, as many are asked for as are ahead of it.
    assert len([version for _, version in run.engine.asked if version == 0]) == BATCH * (1 + staleness)
    assert not run.engine.paused
    for row, ages in zip(run.metrics(), run.ages, strict=True):
        assert (row[names.STALENESS_MEAN], row[names.STALENESS_MAX]) == (np.mean(ages), max(ages))
        spreads = [abs(first - last) for first, last in zip(ages[:: 2 * GROUP], ages[1 :: 2 * GROUP], strict=True)]
        assert row[names.STALENESS_SPREAD] == np.mean(spreads)


def test_a_group_that_is_too_old_is_dropped_and_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, 24)
    run.engine.until = {1: 3}
    run.controller.fit()
    assert sorted(number for step in run.trained for number in step) == list(range(48))
    asked = [version for number, version in run.engine.asked if number == 1]
    assert asked[0] == 0 and asked[1:] == [asked[1]] and asked[1] >= 3
    assert sum(row[names.STALENESS_DROPPED] for row in run.metrics()) == 1
    assert max(map(max, run.ages)) == 1


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
        assert max(map(max, again.ages), default=0) <= 1
    assert in_flight > BATCH


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


class Audited(ControllerFeature):
    """Audits some steps, and so wants all of their tokens from the policy that trains on them."""

    audits = (1, 4, 5)

    def __init__(self, run: Any) -> None:
        super().__init__(run.args)
        self.run = run

    def may_sample_ahead(self, steps: int = 1) -> bool:
        return not any(self.run.step + 1 + later in self.audits for later in range(steps + 1))


def test_an_audited_step_trains_on_its_own_policys_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, tmp_path, 48, "--train.max_staleness", "2")
    run.controller.features.append(Audited(run.controller))
    run.controller.fit()
    oldest = [max(ages) for ages in run.ages]
    assert len(oldest) == 24 and [oldest[step - 1] for step in Audited.audits] == [0, 0, 0]
    assert oldest[5] == 0 and max(oldest) == 2  # a gate may close at an audit, so that none is ahead of the next step


class Died(Exception):
    pass


def test_with_no_engine_left_prompts_wait_for_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before the first step the controller sends them, and later the step in progress, never the thread."""
    run = Run(monkeypatch, tmp_path, 16)
    control, senders = run.controller, []

    def died(*given: Any) -> Any:
        raise Died

    def recover(error: Exception) -> None:
        assert isinstance(error, Died)
        control.engines.serving.clear()

    def bring_back(policy: Any) -> None:
        if not control.engines.serving:
            senders.append(threading.current_thread())
            control.engines.serving[:] = [run.engine.handle()]

    control.engines.recover, control.engines.bring_back = recover, bring_back
    monkeypatch.setattr(groups.ray.exceptions, "RayError", Died)
    call, deaths = Answer.__call__, [0, 20]

    def answer(self: Answer) -> Any:
        if deaths and len(run.engine.asked) > deaths[0]:
            deaths.pop(0)
            raise Died
        return call(self)

    monkeypatch.setattr(Answer, "__call__", answer)
    control.fit()
    assert sorted(number for step in run.trained for number in step) == list(range(32))
    assert len(senders) == 2 and set(senders) == {threading.main_thread()}


def test_what_fails_on_the_thread_ends_the_run_once_its_checkpoint_is_complete(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, 16)
    completed: list[bool] = []
    kept = run.controller.sampler.kept

    def failing(*given: Any) -> Any:
        if len(run.trained) == 2:
            raise TrainingStopped("enough")
        return kept(*given)

    run.controller.sampler.kept = failing
    monkeypatch.setattr(run.controller.saver, "publish", lambda wait=False: completed.append(wait))
    with pytest.raises(TrainingStopped, match="enough"):
        run.controller.fit()
    assert completed[-1] is True


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
