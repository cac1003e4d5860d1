"""Rollouts that are sampled while the step before trains (``--train.async_enable``): in a run without Ray, each row is
trained once, by the policy of the step after the one that sampled it, and a run goes on from any of its checkpoints.
"""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.exceptions import ActorUnavailableError

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.controller.metrics import staleness
from openrlhf_gtpo.training.features.guide import controller as guide_module
from openrlhf_gtpo.training.features.guide.controller import OffPolicy
from openrlhf_gtpo.training.features.sampler_entropy.controller import SamplerEntropyInController
from openrlhf_gtpo.training.rollout.packed import pack, unpack
from openrlhf_gtpo.training.rows import Rollout, Row
from tests.support.controllers import Group, controller, engine_handle, run_arguments
from tests.support.fake_engines import RESCUE, Engine, GuideExecutor, PolicyExecutor, Remote, answers, fours

ARGV = ("--train.num_episodes", "2", "--ckpt.save_steps", "1", "--algo.advantage.is_correction_level", "token")
ARGV += ("--logger.entropy_enable", "--rollout.entropy", "actor")
AHEAD = ("--train.async_enable",)
GUIDE = ("--algo.guide.model_name_or_path", "guide", "--algo.guide.fraction", str(1 / 3), *RESCUE)


class Actors(Group):
    """Ranks whose engines get weights of a version, and which note what was trained with which."""

    def __init__(self, loaded: Any = None) -> None:
        super().__init__(loaded)
        self.log: list[str] = []

    def fit(self, kl_ctl: float) -> dict[str, Any]:
        self.log.append("train")
        return super().fit(kl_ctl)

    def broadcast_to_vllm(self, version: int) -> None:
        self.log.append("send")


class Forgetful(Counter[str]):
    """Counts nothing: a policy that has a part of each group is not rewarded by how often it was asked."""

    def __setitem__(self, key: str, value: int) -> None:
        pass


class Run:
    """A run of group_norm over ``prompts`` prompts.

    Attributes:
        trained: of each step, its number and each row's prompt and seeds.
        actors: with the order in which they trained, sent weights, and engines sampled.
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
        argv += (*ARGV, *(("--ckpt.load_enable",) if loaded else ()))
        self.args = run_arguments(folder, *argv, estimator="group_norm")
        self.actors, self.engine = Actors(loaded), Engine()
        guide = Engine()
        guide.executor, guide.features = GuideExecutor(), (OffPolicy(),)
        guide.executor.asked = Forgetful()
        answers([guide], lambda label: int(label) % 2 == 1 or fours(label))
        monkeypatch.setattr(guide_module, "start_guide", lambda *given: [engine_handle(guide)])
        self.controller = controller(
            monkeypatch, self.args, self.actors, prompts, held_out, [engine_handle(self.engine)]
        )
        if self.args.algo.guide.model_name_or_path:
            self.engine.executor = PolicyExecutor()
            self.engine.executor.asked = Forgetful()
        self.trained: list[Any] = []
        make, sample = self.controller.maker.make, self.controller.sampler.sample

        def made(rows: list[Row], own: bool = True) -> Any:
            seeds = [(row.prompt, row.logs["first"], row.logs["second"], row.off_policy, row.reward) for row in rows]
            self.trained.append((self.controller.step + 1, seeds))
            return make(rows, own)

        def sampled() -> Rollout:
            self.actors.log.append(f"sample with {self.controller.engines.version}")
            return sample()

        self.controller.maker.make, self.controller.sampler.sample = made, sampled

    def metrics(self) -> list[dict[str, Any]]:
        [rows] = read_runs(self.args.logger.metrics_path)
        return [row for row in rows if row["kind"] == "train"]


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return list(map(plain, value))
    return value.tolist() if isinstance(value, torch.Tensor) else value


def without_times(saved: Any) -> Any:
    saved = plain(saved)
    for checkpoint in saved.values():
        del checkpoint["client_states"]["origin"]["settings"]["actor.model_name_or_path"]  # a folder of its run
        for rollout in checkpoint["client_states"].get("rollouts_ahead", ()):
            del rollout["seconds"]
    return saved


@pytest.mark.parametrize("prompts", [16, 18], ids=["whole rollouts", "a short last one"])
def test_each_rollout_is_of_the_step_before(prompts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every prompt is trained on once an episode, in the order of a synchronous run."""
    ahead, in_turn = (
        Run(monkeypatch, tmp_path / name, prompts, *argv) for name, argv in (("ahead", AHEAD), ("turns", ()))
    )
    for run in (ahead, in_turn):
        run.controller.fit()
    assert ahead.trained == in_turn.trained and len(ahead.trained) == 2 * -(-prompts // 4)
    staleness = [row[names.STALENESS_MEAN] for row in ahead.metrics()]
    assert staleness == [0, *[1] * (len(staleness) - 1)] == [row[names.STALENESS_MAX] for row in ahead.metrics()]
    assert all(row[names.IDLE_TRAINER] >= 0 and row[names.IDLE_ENGINES] >= 0 for row in ahead.metrics())
    assert not any(name.startswith("staleness") for name in in_turn.metrics()[0])


def test_engines_sample_while_a_step_trains_and_not_while_weights_are_sent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = Run(monkeypatch, tmp_path, 8, *AHEAD)
    trains, samples = threading.Event(), threading.Event()
    sample, fit, send = run.controller.sampler.sample, run.actors.fit, run.actors.broadcast_to_vllm
    ended: list[int] = []

    def sampled() -> Rollout:
        if ended:  # all but the first
            samples.set()
            assert trains.wait(600)
        rollout = sample()
        ended.append(run.controller.engines.version)
        return rollout

    def fitted(kl_ctl: float) -> Any:
        if len(run.actors.trained) == 0:
            assert samples.wait(600), "the next rollout has not begun"
        trains.set()
        return fit(kl_ctl)

    def sent(version: int) -> None:
        assert len(ended) > len(run.actors.trained) or run.actors.trained[3:], "a rollout is under way"
        send(version)

    run.controller.sampler.sample, run.actors.fit, run.actors.broadcast_to_vllm = sampled, fitted, sent
    run.controller.fit()
    assert len(run.actors.trained) == 4


@pytest.mark.parametrize(
    "flags", [(), ("--algo.dynamic_filtering_enable",), GUIDE], ids=["all", "filtered", "guided and rescued"]
)
@pytest.mark.parametrize("prompts", [16, 18], ids=["whole rollouts", "a short last one"])
def test_a_run_goes_on_from_any_checkpoint(
    prompts: int, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The rollout that was ahead is trained on as it was, and no prompt twice."""
    argv = (*flags, *AHEAD)
    whole = Run(monkeypatch, tmp_path / "whole", prompts, *argv)
    whole.controller.fit()
    tags = [*whole.actors.saved]
    assert len(tags) == len({step for step, _ in whole.trained}) > 2
    for place, (tag, checkpoint) in enumerate(whole.actors.saved.items()):
        again = Run(monkeypatch, tmp_path / tag, prompts, *argv, loaded=checkpoint["client_states"])
        again.controller.fit()
        assert again.trained == [(step, rows) for step, rows in whole.trained if step > place + 1]
        later = {name: whole.actors.saved[name] for name in tags[place + 1 :]}
        assert without_times(again.actors.saved) == without_times(later)


def test_a_synchronous_run_does_not_drop_what_was_sampled_ahead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = Run(monkeypatch, tmp_path / "whole", 8, *AHEAD)
    whole.controller.fit()
    states = whole.actors.saved["global_step1"]["client_states"]
    with pytest.raises(TrainingStopped, match="--train.async_enable"):
        Run(monkeypatch, tmp_path / "again", 8, loaded=states).controller.fit()


def test_staleness_is_that_of_the_tokens() -> None:
    """Those whose version nobody knows count as sampled when the rollout began."""
    tokens, mask = np.arange(4), np.array([False, True, True, True])
    known = Row("a", None, 0, tokens, mask, None, 0, None, versions=np.array([-1, 3, 4, -1], dtype=np.int32))
    unknown = Row("a", None, 0, tokens[:2], mask[:2], None, 0, None)
    ages = staleness(Rollout([known, unknown], 1, False, version=2), step=5)
    assert ages == {names.STALENESS_MEAN: (1 + 0 + 2 + 2) / 4, names.STALENESS_MAX: 2, names.STALENESS_SPREAD: 2}


def test_rows_are_packed_and_unpacked() -> None:
    values = TokenValues(np.array([0, -1.5], dtype=np.float32), np.array([0, np.nan], dtype=np.float32))
    tokens, mask = np.array([5, 70000]), np.array([False, True])
    versions = np.array([-1, 7], dtype=np.int32)
    rows = [
        Row(
            "a",
            None,
            3,
            tokens,
            mask,
            np.array([0, -0.25], dtype=np.float32),
            1.5,
            None,
            logs={"x": 1},
            values=values,
            versions=versions,
        ),
        Row(
            "b",
            {"x": [1], 2: {b"\xff"}},
            4,
            tokens[:1],
            mask[:1],
            None,
            None,
            2,
            truncated=True,
            reward_dtype=torch.float64,
        ),
        Row("c", None, 5, tokens, mask, None, 0, 0, off_policy=True, weight=0.5, metrics={"m": 1.0}),
    ]
    again = unpack(pack(rows))
    for row, unpacked in zip(rows, again, strict=True):
        for field, value in vars(row).items():
            np.testing.assert_equal(getattr(unpacked, field), value, err_msg=field)
        assert unpacked.tokens.dtype == np.int64 and unpacked.mask.dtype == bool
    assert unpack(pack([])) == []


@pytest.mark.parametrize("dies_in", ["rollout 1", "rollout 2", "rollout 3", "evaluation 1"])
@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("flags", [(), AHEAD], ids=["in turns", "ahead"])
def test_with_no_engine_left_what_was_asked_waits_for_weights(
    flags: tuple[str, ...], deaths: int, dies_in: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The controller sends them, never the engines' thread, and again if those engines die too; a rollout ahead gets
    them from the step in progress, and is complete before that step is saved or evaluated."""
    argv = (*flags, "--train.max_restarts", "2", "--eval.steps", "2", "--eval.dataset", "x")
    run = Run(monkeypatch, tmp_path, 8, *argv, held_out=2)
    engines, sampler, senders = run.controller.engines, run.controller.sampler, []
    engines.watch = lambda: None  # whose thread would outlive the test, and ask Ray
    [handle] = engines.serving
    bring_back, dead, asked = engines.bring_back, [], Counter[str]()

    def serves() -> None:
        if dead:
            raise ActorUnavailableError("it is being started", None)

    def brought_back(policy: Any) -> None:
        senders.append(threading.current_thread())
        dead.clear()
        bring_back(policy)

    def dying(what: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*given: Any) -> Any:
            asked[what] += 1
            for _ in range(deaths if dies_in == f"{what} {asked[what]}" else 0):
                dead.append(handle)
                engines.recover(ActorUnavailableError("it is being started", None))
                assert engines.serving == [handle]
            return ask(*given)

        return answer

    handle.serves, engines.bring_back = Remote(serves), brought_back
    sampler.sample, sampler.evaluate = dying("rollout", sampler.sample), dying("evaluation", sampler.evaluate)
    run.controller.fit()
    sent = run.actors.log.count("send")
    assert len(run.trained) == 4 and set(senders) == {threading.main_thread()} and engines.restarts == deaths
    during_a_step = flags and dies_in.startswith("rollout") and dies_in != "rollout 1"
    assert sent == 4 + deaths - bool(during_a_step)


@pytest.mark.parametrize("fails", range(2, 7))
@pytest.mark.parametrize("flags", [(), ("--algo.dynamic_filtering_enable",)], ids=["all", "filtered"])
def test_a_rollout_that_fails_does_not_cost_the_step_before_it(
    flags: tuple[str, ...], fails: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is logged and saved once it is trained, and a run that goes on from it samples that rollout again: no row is
    ahead, and those of the pass are the ones before it."""
    argv = (*flags, *AHEAD)
    whole, run = (Run(monkeypatch, tmp_path / name, 18, *argv) for name in ("whole", "fails"))
    whole.controller.fit()
    groups, begun, completed = run.controller.sampler._groups, [], []

    def sampled(*given: Any) -> Any:
        begun.append(1)
        found = groups(*given)
        if len(begun) == fails:  # its prompts are drawn
            raise TrainingStopped("enough")
        return found

    publish = run.controller.saver.publish
    run.controller.sampler._groups = sampled
    run.controller.saver.publish = lambda wait=False: completed.append(wait) or publish(wait)
    with pytest.raises(TrainingStopped, match="enough"):
        run.controller.fit()
    assert completed[-1] is True
    trained = [step for step, _ in run.trained]
    assert trained and trained == [row["step"] for row in run.metrics()]
    assert [*run.actors.saved] == [f"global_step{step}" for step in trained]
    states = run.actors.saved[f"global_step{trained[-1]}"]["client_states"]
    assert states["origin"]["ahead"] == 0
    assert states["origin"]["drawn"] == states["total_consumed_prompts"] % 18
    again = Run(monkeypatch, tmp_path / "again", 18, *argv, loaded=states)
    again.controller.fit()
    assert run.trained + again.trained == whole.trained


def test_an_audited_rollout_is_not_sampled_ahead(tmp_path: Path) -> None:
    """Nor the one after it, which a closed gate would pay with the actor's entropies."""
    args = run_arguments(tmp_path, *ARGV, *AHEAD, "--rollout.entropy_audit_steps", "4", "--rollout.entropy", "sampler")
    feature = SamplerEntropyInController(args)
    may = []
    for _ in range(9):
        may.append(feature.may_sample_ahead())
        feature.audit.due()
    assert may == [False, True, True, False, False, True, True, False, False]
    feature.audit.closed = True
    assert not feature.may_sample_ahead()
