"""A run that loses an engine and a trainer, is asked to stop, and is resumed by the same command makes the steps of
an undisturbed run: bit by bit, under ``--train.full_determinism_enable`` on a host without CUDA, with two DeepSpeed
actors, a multi-turn agent and every OpenRLHF option that changes a step. benchmarks/reliability/resume_exact.py kills
runs on Megatron.
"""

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import read_runs
from openrlhf_gtpo.report.rollouts import find_dumps, read_settings
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.controller.checkpoint_disk import checkpoint_bytes
from tests.e2e.conftest import Finished, finish
from tests.support import command_of
from tests.support.holding import Hold
from tests.support.slurm_cluster import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

NOT_COMPARED = ("time", names.TIMING_PREFIX, names.TOKENS_PER_SECOND_PREFIX, names.PEAK_MEMORY_PREFIX)
NOT_COMPARED += (names.RESTARTS_ENGINES, names.DROPPED_PROMPTS)  # only in a run that may be restarted
OF_SAMPLING = ("score", "dynamic_filtering_pass_rate", names.TOKENS_SAMPLED)  # which a replay lacks


def test_a_run_that_is_killed_stopped_and_resumed_makes_the_steps_of_one_that_is_not(
    trainer_argv: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """Step 3 is made twice: by the run that goes on beyond its checkpoint of step 2 and loses an engine, and by the
    one that starts again from there. One more run trains on the rollouts of all steps without an interruption."""
    argv = [*trainer_argv, "--algo.advantage.estimator", "grpo_s", "--train.agent_func_path", "agent.py"]
    argv += ["--train.full_determinism_enable", "--train.seed", "7"]
    argv += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "256", "--actor.dual_clip", "3"]
    argv += ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "1"]
    argv += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.01"]
    argv += ["--algo.kl.target", "0.01", "--algo.kl.horizon", "64", "--logger.wandb.run_name", "run"]
    argv += ["--train.enable_ema", "--train.ema_beta", "0.5"]
    argv += ["--actor.entropy_coef", "0.001", "--algo.advantage.is_correction_level", "token"]
    argv += ["--reward.overlong_buffer_len", "4", "--algo.dynamic_filtering_enable"]
    argv += ["--data.max_samples", "32", "--train.num_episodes", "3", "--rollout.micro_batch_size", "4"]
    # See test_slurm_training.py: at 1e-3 the policy may soon want to end at once, which OpenRLHF does not let it do.
    argv += ["--actor.adam.lr", "3e-4"]
    argv += ["--train.batch_size", "12"]  # a rollout of 16 rows makes one step, and so does a filtered one
    argv += ["--ckpt.save_steps", "2", "--ckpt.best_metric_key", "none", "--ckpt.load_enable"]
    folder = tmp_path / "run"
    replay = [*argv, "--train.replay_rollouts", str(folder / "checkpoints"), "--ckpt.save_steps", "-1"]

    argv, hold = _own_folder([*argv, "--logger.dump_rollouts", "1", "--train.max_restarts", "1"], folder)
    actor = folder / "checkpoints" / "_actor"
    (actor / "global_step2").mkdir(parents=True)  # left behind by a run that died in its first checkpoint
    _train_until_stopped([*argv, "--vllm.num_engines", "2"], folder, hold)
    size = sum(path.stat().st_size for path in (actor / "global_step5").rglob("*") if path.is_file())
    estimate = checkpoint_bytes(Model(str(tiny_model), "--model").parameters or 0)  # a lower bound, and a close one
    assert estimate <= size < 1.5 * estimate
    (folder / "checkpoints" / "stop").touch()  # a request that came too late for the first run
    run = finish(argv, folder)
    assert run.code == 0, run.log[-4000:]

    steps = [step["step"] for step in run.steps]  # the filter decides how many
    assert steps == [1, 2, 3, *range(3, steps[-1] + 1)] and steps[-1] >= 6
    planned = {read_settings(dump)["max_steps"] for dump in find_dumps(folder / "checkpoints")}
    assert planned == {24}, "the learning rate's schedule: 32 prompts in rollouts of 4, three times"
    for step in run.steps:  # a rollout that the data set's end cuts short is trained on too
        assert math.isfinite(step["policy_loss"]) and math.isfinite(step["kl"]) and step[names.ENTROPY_ALL] > 0
        # Two turns with an observation between them: both count action tokens alone.
        assert step[names.RESPONSE_LENGTH_MEAN] == pytest.approx(step["response_length"])
        assert 0 < step["dynamic_filtering_pass_rate"] <= 100
        assert step[names.GROUPS_UNIFORM] == 0  # the filter lets none through
        assert step["vllm_kl"] != 0
    assert _to_compare(run.steps[2]) == _to_compare(run.steps[3])
    restarts = [(step[names.RESTARTS_ENGINES], step[names.DROPPED_PROMPTS]) for step in run.steps]
    assert restarts == [(0, 0), (0, 0), (1, 0), *[(0, 0)] * (len(steps) - 3)]

    replayed = finish(_own_folder(replay, tmp_path / "replayed")[0], tmp_path / "replayed")
    assert replayed.code == 0 and "StrictRolloutActor" not in replayed.log, replayed.log[-4000:]
    assert not (replayed.folder / "checkpoints" / "_actor").exists()
    [made] = read_runs(folder / "metrics.jsonl")
    for one, other in zip(replayed.steps, [line for line in made if line["kind"] == "train"], strict=True):
        assert _to_compare(one) == _to_compare(other, *OF_SAMPLING)
    assert _logged(replayed.folder) == _logged(run.folder, *(f"train/{name}" for name in OF_SAMPLING))
    before = load_file(tiny_model / "model.safetensors")
    weights, again = (load_file(one.folder / "model" / "model.safetensors") for one in (run, replayed))
    assert weights.keys() == again.keys() >= before.keys()  # DeepSpeed writes a tied head too
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert sum(not torch.equal(weights[name], before[name]) for name in before) > len(before) // 2


def _own_folder(argv: list[str], folder: Path) -> tuple[list[str], Hold]:
    folder.mkdir()
    hold = Hold(folder)
    (folder / "agent.py").write_text(AGENT)
    own = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.metrics_path": "metrics.jsonl"}
    own["--logger.tensorboard_dir"] = "tensorboard"
    return [*argv, *(str(word) for flag, name in own.items() for word in (flag, folder / name))], hold


@contextmanager
def _running(argv: list[str], folder: Path) -> Iterator[subprocess.Popen]:
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv],
            cwd=folder, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield run
        finally:
            run.kill()


def _train_until_stopped(argv: list[str], folder: Path, hold: Hold) -> None:
    """Kill one of two engines in the rollout of step 3: the other answers its prompts, and it comes back with the
    weights of that step. Send SIGKILL to one of the trainer's ranks in the rollout of step 4, when nobody waits for
    it: the run is restarted from step 2. Send SIGUSR1 in the rollout of step 5: the run makes that step, saves it and
    ends with status 75."""
    hold.after(2)
    with _running(argv, folder) as run:
        until(lambda: len(hold.held()) == 2 or run.poll() is not None, 600, "both engines are asked")
        os.kill(hold.held()[0], signal.SIGKILL)
        hold.after(3)
        _wait_for_step(3, run, folder)
        ranks = [one for one in psutil.Process(run.pid).children(recursive=True) if _is_trainer(one)]
        assert len(ranks) == 2, (folder / "log").read_text()[-4000:]
        ranks[1].kill()
        hold.after(4)
        _wait_for_step(4, run, folder)
        run.send_signal(signal.SIGUSR1)
        until(lambda: (folder / "checkpoints" / "stop").exists() or run.poll() is not None, 600, "the request")
        hold.release()
        code = run.wait(timeout=600)
    text = (folder / "log").read_text()
    assert code == 75, text[-4000:]
    assert [step["step"] for step in Finished(code, text, folder).steps] == [1, 2, 3, 3, 4, 5]  # 5 was in progress
    assert "of 2 (counted from 0) died: " in text and "Restarting it" in text
    assert "train_ppo_ray stopped: a process of the run died" in text
    assert "restart 1 of 1 resumes from its last checkpoint" in text
    assert "train_ppo_ray stopped: on request, after step 5, which is saved" in text.strip().splitlines()[-1]


def _is_trainer(process: psutil.Process) -> bool:
    """True if Ray's title of the process names its class, or upstream's while a method runs."""
    return re.match(r"ray::\w*Policy", command_of(process)) is not None


def _wait_for_step(step: int, run: subprocess.Popen, folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    line = f'"train", "step": {step},'
    until(lambda: metrics.exists() and line in metrics.read_text() or run.poll() is not None, 600, f"step {step}")


def _logged(folder: Path, *but: str) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run, except its times."""
    events = EventAccumulator(str(folder / "tensorboard" / "run")).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.removeprefix("train/").startswith(NOT_COMPARED)]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags if tag not in but}


def _to_compare(entry: dict[str, Any], *but: str) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.startswith(NOT_COMPARED) and name not in but}


AGENT = """
import sys
from pathlib import Path

import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

sys.path.insert(0, str(Path(__file__).parent))
import holding_reward


class Agent(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
        holding_reward.wait()
        return {"observation": states["observation"]}

    async def step(self, states, **kwargs):
        self.turns += 1
        reward = torch.tensor(float(len(states["action_text"]) % 2))
        return {
            "rewards": reward if self.turns == 2 else torch.tensor(0.0),
            "scores": reward,
            "environment_feedback": " 1 2 3 ",
            "done": self.turns == 2,
            "sampling_params": states["sampling_params"],
            "extra_logs": {},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(Agent)
"""
