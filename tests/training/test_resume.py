"""A controller that goes on from any of its checkpoints does what an uninterrupted one does. The actors' part is in
test_optimizer_steps.py and tests/megatron; tests/e2e/test_stop.py kills whole runs.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from openrlhf.cli import train_ppo_ray
from openrlhf.trainer import ppo_trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf_gtpo.errors import StoppedOnRequest
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.report.metrics import MetricsWriter, read_runs
from openrlhf_gtpo.training.controller import cluster_checks
from openrlhf_gtpo.training.controller import controller as controller_module
from openrlhf_gtpo.training.controller.stop import stop_file
from openrlhf_gtpo.training.controller.trackers import FlushedTensorboard
from openrlhf_gtpo.training.features.guide import controller as guide_module
from openrlhf_gtpo.training.features.guide.controller import OffPolicy
from openrlhf_gtpo.training.rollout.packed import unpack
from openrlhf_gtpo.training.rollout.sampler import Sampler
from openrlhf_gtpo.training.rows import Row
from openrlhf_gtpo.training.run import run
from tests.support.controllers import Group, controller, engine_handle, run_arguments
from tests.support.fake_engines import RESCUE, Engine, GuideExecutor, PolicyExecutor, answers, fours

SCORES = {2: 0.1, 4: 0.3, 6: 0.2}  # held-out reward, by step: the best is at 4

# An odd number of prompts waits in between.
SLOWLY = ("--algo.guide.rescue_batch", "3", "--algo.guide.steps", "3")
GUIDE = ("--algo.guide.model_name_or_path", "guide", "--algo.guide.fraction", str(1 / 3), *RESCUE, *SLOWLY)
AUDITS = ("--actor.backend", "megatron", "--megatron.fp8", "emulated", "--megatron.fp8_audit_steps", "3")
ADAPTIVE = ("--algo.kl.init_coef", "0.1", "--algo.kl.target", "0.05", "--algo.kl.horizon", "100")


class Run:
    """A whole run whose held-out rewards are ``SCORES``.

    Attributes:
        trained: of each step, its number, its own rows and those that joined it, as seeds of their turns, and the KL
            coefficient and how often the actors were asked for exact values before it.
        evaluated: the steps after which there was an evaluation.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        prompts: int,
        *argv: str,
        loaded: dict[str, Any] | None = None,
    ) -> None:
        argv += ("--train.num_episodes", "2", "--eval.dataset", "x", "--eval.steps", "2", "--ckpt.save_steps", "1")
        argv += ("--ckpt.load_enable",) if loaded else ()
        self.args = run_arguments(folder, *argv)
        self.actors = Group(loaded, lambda number: {"kl": 0.01 * self._rows})
        self._rows = 0
        guides = [Engine(), Engine()]
        for engine in guides:
            engine.executor, engine.features = GuideExecutor(), (OffPolicy(),)
        answers(guides, fours)
        monkeypatch.setattr(guide_module, "start_guide", lambda *given: list(map(engine_handle, guides)))
        own = Engine()
        if self.args.algo.guide.model_name_or_path:
            own.executor = PolicyExecutor()
        self.controller = controller(monkeypatch, self.args, self.actors, prompts, 1, [engine_handle(own)])
        self.trained: list[Any] = []
        self.evaluated: list[int] = []
        self._watch()

    def fit(self) -> None:
        self.controller.fit()

    @property
    def saved(self) -> dict[str, Any]:
        return self.actors.saved

    def _watch(self) -> None:
        sampler, sample, evaluate = self.controller.sampler, self.controller.sampler.sample, Sampler.evaluate

        def sampled() -> Any:
            rollout = sample()
            if rollout.rows:
                asked = [name for name, _ in self.actors.called].count("set_high_precision")
                seeds = [[tuple(map(_plain_row, rows)) for rows in (rollout.rows, rollout.others)]]
                self.trained.append((self.controller.step + 1, *seeds, float(self.controller.kl_control.value), asked))
                self._rows = len(rollout.rows)
            return rollout

        def evaluated(temperature: float, samples: int) -> list[Row]:
            step = self.controller.step
            self.evaluated.append(step)
            if self.args.algo.guide.model_name_or_path:  # PolicyExecutor expects what training asks for
                return [
                    Row("", "", 0, np.array([1, 2]), np.array([False, True]), None, SCORES.get(step, 0.0), None)
                ] * samples
            rows = evaluate(sampler, temperature, samples)
            for row in rows:
                row.reward = SCORES.get(step, 0.0)
            return rows

        sampler.sample, sampler.evaluate = sampled, evaluated


def _plain_row(row: Row) -> tuple[Any, ...]:
    return row.prompt, row.logs["first"], row.logs["second"], row.off_policy


def plain(value: Any) -> Any:
    if isinstance(value, dict):  # without a folder that each run has for itself
        return {name: plain(one) for name, one in value.items() if name != "actor.model_name_or_path"}
    return value.tolist() if isinstance(value, torch.Tensor) else value


def resumed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, prompts: int, *argv: str, tag: str, checkpoint: dict[str, Any]
) -> Run:
    """A run that goes on from a checkpoint of an earlier one, and has done so until its end."""
    states = checkpoint["client_states"]
    again = Run(monkeypatch, folder, prompts, *argv, loaded=states)
    if tag.startswith("best"):  # written after its evaluation
        step = states["global_step"]
        MetricsWriter(folder / "metrics.jsonl").write("eval", step, {"eval_x_pass1": SCORES[step]})
    again.fit()
    return again


@pytest.mark.parametrize(
    ("prompts", "filtered"),
    [(16, ()), (18, ("--algo.dynamic_filtering_enable",))],
    ids=["whole rollouts, all", "a short last one, filtered"],
)
def test_the_controller_goes_on_from_any_checkpoint(
    prompts: int, filtered: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The prompts, their order and seeds, KL coefficients, audits, evaluations and checkpoints are the same."""
    argv = (*filtered, *ADAPTIVE, *AUDITS)
    whole = Run(monkeypatch, tmp_path / "whole", prompts, *argv)
    whole.fit()
    drawn = [prompt for _, (rows, _), *_ in whole.trained for prompt in {row[0] for row in rows}]
    wanted = [str(i) for i in range(prompts) if i % 2 or not filtered]  # the filter drops even labels
    assert sorted(drawn) == sorted(2 * wanted) and len(whole.trained) > 2
    assert len({coefficient for *_, coefficient, _ in whole.trained}) > 1
    for tag, checkpoint in whole.saved.items():
        step = checkpoint["client_states"]["global_step"]
        again = resumed(monkeypatch, tmp_path / tag, prompts, *argv, tag=tag, checkpoint=checkpoint)
        before = whole.trained[step][-1] if step < len(whole.trained) else 0
        assert again.trained == [(*rest, asked - before) for *rest, asked in whole.trained[step:]]
        evaluated = [number for number in whole.evaluated if number > step - (not tag.startswith("best"))]
        assert again.evaluated == evaluated
        assert (checkpoint["metric_value"] is not None) == tag.startswith("best"), "evaluated once it is saved"
        later = {
            name: one for name, one in whole.saved.items() if [*whole.saved].index(name) > [*whole.saved].index(tag)
        }
        assert plain(again.saved) == plain(later)


def test_prompts_that_wait_for_the_guide_are_in_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A resumed run rescues the same prompts at the same steps, with the same responses; none is rescued twice."""
    whole = Run(monkeypatch, tmp_path / "whole", 40, *GUIDE)
    whole.fit()
    found = [prompt for _, (_, others), *_ in whole.trained for prompt, *_ in others[::3]]
    assert len(found) > 4 and max(map(found.count, found)) <= 2, "two episodes"
    waiting = 0
    for tag, checkpoint in whole.saved.items():
        states = checkpoint["client_states"]
        waiting += len(unpack(states["rescue_rows"]["failures"])) > 0
        again = resumed(monkeypatch, tmp_path / tag, 40, *GUIDE, tag=tag, checkpoint=checkpoint)
        assert again.trained == whole.trained[states["global_step"] :]
        ends = [
            (one.controller.sampler.queue.rescued, one.controller.sampler.queue.given_up) for one in (whole, again)
        ]
        assert ends[0] == ends[1]
    assert waiting > 3


@pytest.mark.parametrize("is_resumed", [False, True])
def test_the_first_rollout_may_take_as_long_as_it_likes(
    is_resumed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after the transfer of a checkpoint's weights. Engines are watched once they have loaded."""
    done: list[str] = []
    states: dict[str, Any] = {"global_step": 3, "episode": 1, "total_consumed_prompts": 12}
    states["data_loader_state_dict"] = {}

    def beat(self: Heartbeat, going_on: Callable[[], bool] | None = None) -> None:
        done.append("goes on" if going_on else "once")

    monkeypatch.setattr(Heartbeat, "beat", beat)
    again = Run(monkeypatch, tmp_path, 8, "--train.stall_timeout", "60", loaded=states if is_resumed else None)
    monkeypatch.setattr(controller_module, "wait_for_engines", lambda engines: done.append("engines have loaded"))
    again.controller.engines.watch = lambda: done.append("engines are watched")

    def sample() -> Any:
        done.append("rollout")
        raise StoppedOnRequest("enough")

    again.controller.sampler.sample = sample
    with pytest.raises(StoppedOnRequest):
        again.fit()
    assert done[:2] == ["engines have loaded", "engines are watched"]
    assert ("once" in done) == is_resumed and done[done.index("rollout") - 1] == "goes on"


def test_a_fixed_kl_coefficient_is_what_the_command_line_of_the_resumed_run_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = {"global_step": 3, "episode": 2, "total_consumed_prompts": 12, "kl_coefficient": 0.1}
    states["data_loader_state_dict"] = {}
    coefficient = ("--algo.kl.init_coef", "0.5")
    for argv, goes_on_with in ((coefficient, 0.5), ((*coefficient, "--algo.kl.target", "6"), 0.1)):
        again = Run(monkeypatch, tmp_path, 16, *argv, loaded=states)
        again.fit()
        assert again.controller.kl_control.value == goes_on_with


def test_an_evaluation_that_was_made_counts_for_the_best_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run died between an evaluation and the checkpoint that the evaluation calls for."""
    whole = Run(monkeypatch, tmp_path, 8)
    whole.fit()
    states = whole.saved["global_step4"]["client_states"]
    again = Run(monkeypatch, tmp_path, 8, loaded=states)
    again.fit()
    assert again.evaluated == [] and list(again.saved) == ["best_global_step4"]
    assert plain(again.saved["best_global_step4"]) == plain(whole.saved["best_global_step4"])


@pytest.mark.usefixtures("brief_waits")
def test_a_run_has_ended_when_its_model_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until then it is made again from its last checkpoint (``experiment/runner.py``)."""
    whole = Run(monkeypatch, tmp_path, 8)
    monkeypatch.setattr(ppo_trainer, "PPOTrainer", SimpleNamespace(remote=lambda: SimpleNamespace(end=end)))
    monkeypatch.setattr(train_ppo_ray, "RayActorGroup", None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster_checks, "check_nodes", lambda args: None)
    end = SimpleNamespace(remote=lambda: whole.controller.end())

    def ended() -> bool:
        return any(row.get("ended") for row in read_runs(tmp_path)[-1])

    def train(args: SimpleNamespace) -> None:
        ppo_trainer.PPOTrainer.remote()
        whole.fit()
        stop_file(whole.args).touch()  # as the model is written: too late
        assert not ended()  # the driver has the model written

    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def flush(self: MetricsWriter) -> None:  # the line waits for room
        if failures:
            raise failures.pop()

    monkeypatch.setattr(MetricsWriter, "flush", flush)
    monkeypatch.setattr(train_ppo_ray, "train", train)
    run(whole.args)
    assert ended() and not failures and not stop_file(whole.args).exists()


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    """What a run has logged is there when it is killed; steps after the checkpoint come from the run that went on."""
    args = SimpleNamespace(
        logger=SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run"))
    )

    def read() -> list[tuple[int, float]]:
        found = EventAccumulator(str(tmp_path / "run")).Reload()
        return [(event.step, event.value) for event in found.Scalars("train/x")]

    def next_second() -> None:
        """TensorBoard reads files in the order of their names: the second, then a number that is no run's first."""
        time.sleep(1 - time.time() % 1)

    killed = FlushedTensorboard(args)
    for step in (1, 2, 3):
        killed.log_train(step, {"x": 1.0})
    assert read() == [(1, 1.0), (2, 1.0), (3, 1.0)]
    next_second()
    resumed = FlushedTensorboard(args)
    resumed.go_on(2)
    resumed.log_train(3, {"x": 2.0})
    assert read() == [(1, 1.0), (2, 1.0), (3, 2.0)]
    next_second()
    anew = FlushedTensorboard(args)
    anew.go_on(0)
    anew.log_train(1, {"x": 3.0})
    assert read() == [(1, 3.0)]
