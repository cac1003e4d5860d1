"""A run that is asked to stop, and resumed by the same command, is the run that nobody stopped: bit by bit, under
``--train.full_determinism_enable`` on a host without CUDA, with two DeepSpeed actors, a multi-turn agent and every
OpenRLHF option that changes a step. tests/e2e/test_slurm_training.py stops Megatron.
"""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.integration.controller.checkpoint_disk import checkpoint_bytes, parameters_of
from openrlhf_gtpo.report import names
from tests.e2e.conftest import Finished, finish
from tests.e2e.holding import Hold
from tests.slurm_cluster import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

TIMES = ("time", names.TIMING_PREFIX, names.TOKENS_PER_SECOND_PREFIX, names.PEAK_MEMORY_PREFIX)


def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(trainer_argv, tiny_model, tmp_path) -> None:
    argv = [*trainer_argv, "--algo.advantage.estimator", "grpo_s", "--train.agent_func_path", "agent.py"]
    argv += ["--train.full_determinism_enable", "--train.seed", "7"]
    argv += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "256", "--actor.dual_clip", "3"]
    argv += ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "1"]
    argv += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.01"]
    argv += ["--actor.entropy_coef", "0.001", "--algo.advantage.is_correction_level", "token"]
    argv += ["--reward.overlong_buffer_len", "4", "--algo.dynamic_filtering_enable", "--vllm.sync_checksum"]
    argv += ["--data.max_samples", "32", "--rollout.micro_batch_size", "4", "--ckpt.load_enable"]
    # At 1e-3 the policy may soon want to end at once, which OpenRLHF does not let the engine do: see test_megatron.py.
    argv += ["--actor.adam.lr", "3e-4"]
    argv += ["--ckpt.best_metric_key", "none"]  # and --ckpt.save_steps -1: no checkpoint but that of the stop

    whole_argv, _ = _own_folder(argv, tmp_path / "whole")
    whole = finish(whole_argv, tmp_path / "whole")
    assert whole.code == 0, whole.log[-4000:]
    assert not (whole.folder / "checkpoints" / "_actor").exists()
    steps = [step["step"] for step in whole.steps]  # how many, the filter decides
    assert len(steps) >= 3 and steps == [*range(1, len(steps) + 1)]
    for step in whole.steps:  # a rollout that the data set's end leaves short is trained on too
        assert math.isfinite(step["policy_loss"]) and math.isfinite(step["kl"]) and step[names.ENTROPY_ALL] > 0
        # Two turns with an observation between them: fewer action tokens than the span from first to last.
        assert step[names.RESPONSE_LENGTH_MEAN] < step["response_length"]
        assert 0 < step["dynamic_filtering_pass_rate"] <= 100
        assert step[names.GROUPS_UNIFORM] == 0  # the filter lets none through
        assert step["vllm_kl"] != 0

    argv, hold = _own_folder(argv, tmp_path / "parts")
    # What a run leaves that died in its first checkpoint.
    (tmp_path / "parts" / "checkpoints" / "_actor" / "global_step2").mkdir(parents=True)
    _train_until_stopped(argv, tmp_path / "parts", hold)
    saved = tmp_path / "parts" / "checkpoints" / "_actor" / "global_step2"
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    estimate = checkpoint_bytes(parameters_of(str(tiny_model)))  # from below, and not by much
    assert estimate <= size < 1.5 * estimate
    (tmp_path / "parts" / "checkpoints" / "stop").touch()  # one that came too late for the first run
    resumed = finish(argv, tmp_path / "parts")
    assert resumed.code == 0, resumed.log[-4000:]

    for one, other in zip(whole.metrics, resumed.metrics, strict=True):
        assert _without_times(one) == _without_times(other)
    before = load_file(tiny_model / "model.safetensors")
    weights, again = (load_file(run.folder / "model" / "model.safetensors") for run in (whole, resumed))
    assert weights.keys() == again.keys() >= before.keys()  # DeepSpeed's writes a tied head too
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert sum(not torch.equal(weights[name], before[name]) for name in before) > len(before) // 2


def _own_folder(argv: list[str], folder: Path) -> tuple[list[str], Hold]:
    folder.mkdir()
    hold = Hold(folder)
    (folder / "agent.py").write_text(AGENT)
    own = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.metrics_path": "metrics.jsonl"}
    return [*argv, *(str(word) for flag, name in own.items() for word in (flag, folder / name))], hold


def _train_until_stopped(argv: list[str], folder: Path, hold: Hold) -> None:
    """SIGUSR1 in the rollout of step 2: the run makes that step, saves it and ends with status 75."""
    hold.after(1)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv],
            cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        metrics = folder / "metrics.jsonl"
        try:
            until(
                lambda: metrics.exists() and '"train"' in metrics.read_text() or run.poll() is not None,
                600,
                "a step",
            )
            run.send_signal(signal.SIGUSR1)
            until(lambda: (folder / "checkpoints" / "stop").exists() or run.poll() is not None, 100, "the request")
            hold.release()
            code = run.wait(timeout=300)
        finally:
            run.kill()
    text = (folder / "log").read_text()
    assert code == 75, text[-4000:]
    assert [step["step"] for step in Finished(code, text, folder).steps] == [1, 2]  # 2 was in progress
    assert "train_ppo_ray stopped: asked to, after step 2, which is saved" in text.strip().splitlines()[-1]


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.startswith(TIMES)}


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
