"""A controller that goes on from any of its checkpoints does what an uninterrupted one does. The actors' part is in
test_optimizer_steps.py and tests/megatron; tests/e2e/test_stop.py kills whole runs.
"""

import errno
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from fake_engines import RESCUE, answers, fours, guided, rows, sampling
from openrlhf.cli import train_ppo_ray
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter

from openrlhf_gtpo.errors import StoppedOnRequest
from openrlhf_gtpo.report.metrics import MetricsWriter, read_runs
from openrlhf_gtpo.training.actors import actor_trainer
from openrlhf_gtpo.training.actors.strategy import Strategy
from openrlhf_gtpo.training.controller import cluster_checks, trainer
from openrlhf_gtpo.training.controller.spikes import Spikes
from openrlhf_gtpo.training.controller.stop import stop_file
from openrlhf_gtpo.training.controller.trainer import EntropyTrainer, FlushedTensorboard
from openrlhf_gtpo.training.run import run

SCORES = {2: 0.1, 4: 0.3, 6: 0.2}  # held-out reward, by step: the best is at 4


# An odd number of prompts waits in between.
SLOWLY = ("--algo.guide.rescue_batch", "3", "--algo.guide.steps", "3")


class Group:
    """Actors that keep what they are told to save, by its tag, and answer with what they were started from."""

    def __init__(self, loaded: dict[str, Any]) -> None:
        self.loaded, self.saved = loaded, {}

    def async_run_method(self, method_name: str, **given: Any) -> list[Any]:
        if method_name == "save_checkpoint":
            torch.save(given, path := Path(self.folder, given["tag"]))
            self.saved[given["tag"]] = torch.load(path)
        return [dict(self.loaded)]


class Controller(EntropyTrainer):
    """The controller with upstream's ``fit``, over fake actors and engines; training only records its inputs."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        folder: Path,
        prompts: int,
        filtered: bool,
        loaded: dict[str, Any],
        rescues: bool = False,
    ) -> None:
        monkeypatch.setattr(ray, "get", lambda results: results)
        self.samples_generator = sampling(monkeypatch)
        if rescues:
            self.samples_generator, engines = guided(monkeypatch, 1 / 3, *RESCUE, *SLOWLY)
            self.guide = self.samples_generator._guide
            answers(engines, fours)
            monkeypatch.setattr(trainer, "wait_for_engines", lambda *of: None)
        self.args = args = self.samples_generator.args
        args.algo.dynamic_filtering_enable = filtered  # drops even labels
        args.train.num_episodes, args.train.stall_timeout = 2, 0.0
        args.eval = SimpleNamespace(steps=2, before_training=False, temperature=0.0, n_samples_per_prompt=1)
        args.logger = SimpleNamespace(logging_steps=1, metrics_path=str(folder / "metrics.jsonl"))
        args.ckpt = SimpleNamespace(save_steps=1, path=str(folder), stop_file=None, load_enable=bool(loaded))
        args.ds = SimpleNamespace(param_dtype="bf16")
        (folder / "_actor").mkdir(parents=True, exist_ok=True)
        data = [("", str(i), str(i), None) for i in range(prompts)]
        collate = lambda items: [list(column) for column in zip(*items, strict=True)]  # noqa: E731
        torch.seed()  # nobody seeds this process
        self.prompts_dataloader = Strategy(seed=1, args=args).setup_dataloader(data, 1, False, True, collate)
        self.samples_generator.prompts_dataloader, self.eval_dataloader = self.prompts_dataloader, [None]
        self.actor_model_group, self.critic_model_group, self.vllm_engines = Group(loaded), None, None
        self.actor_model_group.folder = folder
        self.wandb_logger = self.tensorboard_logger = None
        self.metrics_writer = MetricsWriter(folder / "metrics.jsonl")
        self.kl_ctl = AdaptiveKLController(0.1, 0.05, 100)
        self.costs = SimpleNamespace(begin=lambda: None, end=dict, response_tokens=1)
        self.experience_maker = SimpleNamespace(seconds={}, audit=SimpleNamespace(batches=0, closed=False))
        self.best_eval_metric_key, self.best_eval_metric_value = "", -math.inf
        self._latest_eval_metric_value, self.generate_kwargs = None, {}
        self.warnings, self.failed_saves = {}, []
        self.heartbeat, self.spikes = None, Spikes(0.0)
        self.engines = SimpleNamespace(watch=lambda: None, check=lambda: 0, bring_back=lambda policy: None)
        self.trained: list[Any] = []
        self.rescued: list[Any] = []  # by step
        self.evaluated: list[int] = []
        args.actor = SimpleNamespace(backend="deepspeed")
        args.train.seed, args.algo.advantage.estimator = 1, "gtpo"

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        audit, generator = self.experience_maker.audit, self.samples_generator
        self.trained.append((global_step + 1, rows(rollout_samples), self.kl_ctl.value, audit.batches, audit.closed))
        self.rescued.append(rows(generator.rescued))
        generator.rescued = []
        if self.guide:
            self.guide.step = global_step + 1
        self.kl_ctl.update(0.01 * len(rollout_samples), 12)
        audit.batches, audit.closed = audit.batches + 1, not audit.closed
        return {}, global_step + 1

    def evaluate(self, global_step: int, **generation: Any) -> dict[str, float]:
        self.evaluated.append(global_step)
        logs = {"eval_x_pass1": SCORES.get(global_step, 0.0)}
        self.metrics_writer.write("eval", global_step, logs)
        return logs


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("filtered", [False, True], ids=["all", "filtered"])
@pytest.mark.parametrize("prompts", [16, 18], ids=["whole rollouts", "a short last one"])
def test_the_controller_goes_on_from_any_checkpoint(
    prompts: int, filtered: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The prompts, their order and seeds, KL coefficients, audits, evaluations and checkpoints are the same."""
    whole = Controller(monkeypatch, tmp_path / "whole", prompts, filtered, {})
    whole.fit()
    drawn = [prompt for _, sampled, *_ in whole.trained for prompt in {row[0] for row in sampled}]
    wanted = [str(i) for i in range(prompts) if i % 2 or not filtered]
    assert sorted(drawn) == sorted(2 * wanted) and len(whole.trained) > 2
    saved = whole.actor_model_group.saved
    for tag, checkpoint in saved.items():
        step = checkpoint["client_states"]["global_step"]
        resumed = Controller(monkeypatch, tmp_path / tag, prompts, filtered, checkpoint["client_states"])
        if tag.startswith("best"):  # written after its evaluation
            resumed.metrics_writer.write("eval", step, {"eval_x_pass1": SCORES[step]})
        resumed.fit()
        assert resumed.trained == whole.trained[step:]
        evaluated = [number for number in whole.evaluated if number > step - (not tag.startswith("best"))]
        assert resumed.evaluated == evaluated
        assert (checkpoint["metric_value"] is not None) == tag.startswith("best"), "evaluated once it is saved"
        later = {name: one for name, one in saved.items() if list(saved).index(name) > list(saved).index(tag)}
        assert plain(resumed.actor_model_group.saved) == plain(later)


def test_prompts_that_wait_for_the_guide_are_in_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A resumed run rescues the same prompts at the same steps, with the same responses; none is rescued twice."""
    whole = Controller(monkeypatch, tmp_path / "whole", 40, True, {}, rescues=True)
    whole.fit()
    prompts = [[prompt for prompt, *_ in step[::3]] for step in whole.rescued]
    found = [prompt for step in prompts for prompt in step]
    assert len(found) > 4 and max(map(found.count, found)) <= 2, "two episodes"
    waiting = 0
    for tag, checkpoint in whole.actor_model_group.saved.items():
        states = checkpoint["client_states"]
        step, folder = states["global_step"], tmp_path / tag
        waiting += len(states["rescue"]["failures"]) > 2
        resumed = Controller(monkeypatch, folder, 40, True, states, rescues=True)
        if tag.startswith("best"):
            resumed.metrics_writer.write("eval", step, {"eval_x_pass1": SCORES[step]})
        resumed.fit()
        assert resumed.trained == whole.trained[step:] and resumed.rescued == whole.rescued[step:]
        ends = [
            (one.samples_generator.rescue.rescued, one.samples_generator.rescue.given_up) for one in (whole, resumed)
        ]
        assert ends[0] == ends[1]
    assert waiting > 3


@pytest.mark.parametrize("resumed", [False, True])
def test_the_first_rollout_may_take_as_long_as_it_likes(
    resumed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also after the transfer of a checkpoint's weights. Engines are watched once they have loaded."""
    done: list[str] = []
    states: dict[str, Any] = {"global_step": 3, "episode": 1, "total_consumed_prompts": 12}
    states["data_loader_state_dict"] = {}
    run = Controller(monkeypatch, tmp_path, 8, False, states if resumed else {})
    run.eval_dataloader, run.reward_model_group, run.reference_model_group = None, None, None
    run.actor_model_group._actor_handlers = []
    run.vllm_engines, run.args.vllm.enable_sleep = [], False
    monkeypatch.setattr(trainer, "wait_for_engines", lambda engines: done.append("engines have loaded"))
    run.engines.watch = lambda: done.append("engines are watched")
    beat = lambda going_on=None: done.append("goes on" if going_on else "once")  # noqa: E731
    run.heartbeat = SimpleNamespace(beat=beat, clear=lambda: None)

    def sample(**generation: Any) -> Any:
        done.append("rollout")
        raise StoppedOnRequest("enough")

    monkeypatch.setattr(run.samples_generator, "generate_samples", sample)
    with pytest.raises(StoppedOnRequest):
        run.fit()
    assert done[:2] == ["engines have loaded", "engines are watched"]
    assert ("once" in done) == resumed and done[-2:] == ["goes on", "rollout"]


def test_a_fixed_kl_coefficient_is_what_the_command_line_of_the_resumed_run_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    states = {"global_step": 3, "episode": 0, "total_consumed_prompts": 12, "kl_coefficient": 0.1}
    for coefficient, goes_on_with in ((FixedKLController(0.5), 0.5), (AdaptiveKLController(0.5, 6.0, 100), 0.1)):
        resumed = Controller(monkeypatch, tmp_path, 16, False, states)
        resumed.kl_ctl = coefficient
        resumed.init_checkpoint_states()
        assert resumed.kl_ctl.value == goes_on_with


@pytest.mark.parametrize(
    ("asked", "saved", "key", "best"),
    [
        ("", "eval_x_pass1", "eval_x_pass1", 0.9),
        ("", "none", "", -math.inf),
        ("none", "eval_x_pass1", "none", -math.inf),
        ("eval_x_pass1", "eval_x_pass1", "eval_x_pass1", 0.9),
        ("eval_y_pass1", "eval_x_pass1", "eval_y_pass1", -math.inf),
        ("eval_y_pass1", "none", "eval_y_pass1", -math.inf),
    ],
)
def test_the_best_checkpoint_is_by_the_metric_of_the_resumed_runs_command_line(
    asked: str, saved: str, key: str, best: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without one there, by that of the checkpoint, whose best value counts only for its own metric."""
    resumed = Controller(monkeypatch, tmp_path, 8, False, {})
    resumed.best_eval_metric_key = asked
    resumed.restore_best_checkpoint_state({"best_eval_metric_key": saved, "best_eval_metric_value": 0.9})
    assert (resumed.best_eval_metric_key, resumed.best_eval_metric_value) == (key, best)


def test_an_evaluation_that_was_made_counts_for_the_best_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The run died between an evaluation and the checkpoint that the evaluation calls for."""
    whole = Controller(monkeypatch, tmp_path, 8, False, {})
    whole.fit()
    saved = whole.actor_model_group.saved
    resumed = Controller(monkeypatch, tmp_path, 8, False, saved["global_step4"]["client_states"])
    resumed.fit()
    assert resumed.evaluated == [] and list(resumed.actor_model_group.saved) == ["best_global_step4"]
    assert plain(resumed.actor_model_group.saved["best_global_step4"]) == plain(saved["best_global_step4"])


def test_a_run_has_ended_when_its_model_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Until then it is made again from its last checkpoint (``experiment/runner.py``)."""
    whole = Controller(monkeypatch, tmp_path, 8, False, {})
    monkeypatch.setattr(ppo_trainer, "PPOTrainer", SimpleNamespace(remote=lambda: SimpleNamespace(end=end)))
    monkeypatch.setattr(train_ppo_ray, "RayActorGroup", None)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster_checks, "check_nodes", lambda args: None)
    end = SimpleNamespace(remote=whole.end)

    def ended() -> bool:
        return any(row.get("ended") for row in read_runs(tmp_path)[-1])

    def train(args: SimpleNamespace) -> None:
        ppo_trainer.PPOTrainer.remote()
        whole.fit()
        stop_file(whole.args).touch()  # as the model is written: too late
        assert not ended()  # the driver has the model written

    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def flush() -> None:  # the line waits for room
        if failures:
            raise failures.pop()

    monkeypatch.setattr(actor_trainer, "_WAIT", 0)
    monkeypatch.setattr(whole.metrics_writer, "flush", flush)
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

    killed = FlushedTensorboard(args)
    for step in (1, 2, 3):
        killed.log_train(step, {"x": 1.0})
    assert read() == [(1, 1.0), (2, 1.0), (3, 1.0)]
    resumed = FlushedTensorboard(args)
    resumed.go_on(2)
    resumed.log_train(3, {"x": 2.0})
    assert read() == [(1, 1.0), (2, 1.0), (3, 2.0)]
    anew = FlushedTensorboard(args)
    anew.go_on(0)
    anew.log_train(1, {"x": 3.0})
    assert read() == [(1, 3.0)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_costs_tensorboard_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = SimpleNamespace(tensorboard_dir=str(tmp_path), wandb=SimpleNamespace(run_name="run"))
    logger, flush, full = FlushedTensorboard(SimpleNamespace(logger=names)), RecordWriter.flush, False

    def flush_if_there_is_room(self: RecordWriter) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        flush(self)

    monkeypatch.setattr(RecordWriter, "flush", flush_if_there_is_room)
    for step, full in enumerate((False, True, True, False), start=1):  # noqa: B007, read above
        logger.log_train(step, {"x": 1.0})
    said = [f"Warning: TensorBoard misses logs of step {step} (No space left on device)." for step in (2, 3)]
    assert [line for line in capsys.readouterr().out.splitlines() if "TensorBoard" in line] == said
    found = EventAccumulator(str(tmp_path / "run")).Reload().Scalars("train/x")
    assert {event.step for event in found} - {2, 3} == {1, 4}  # files of one second have no order
