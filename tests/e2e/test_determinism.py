"""Two runs with the same seed and ``--train.full_determinism_enable`` are the same run, bit by bit, on a host without CUDA:
with two data-parallel actors, a multi-turn agent and every option of OpenRLHF's that changes a step.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.report import names
from tests.e2e.conftest import Finished, finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

DETERMINISTIC = ["--train.full_determinism_enable", "--train.seed", "7", "--actor.adam.lr", "3e-4"]
TIMES = ("time", names.TIMING_PREFIX, names.TOKENS_PER_SECOND_PREFIX, names.PEAK_MEMORY_PREFIX)


def test_two_runs_are_one(trainer_argv: list[str], tiny_model: Path, tmp_path: Path) -> None:
    argv = [*trainer_argv, "--algo.advantage.estimator", "grpo_s", "--train.agent_func_path", "agent.py"]
    argv += ["--train.dynamic_batch_enable", "--train.max_tokens_per_gpu", "256", "--actor.dual_clip", "3"]
    argv += ["--actor.num_gpus_per_node", "2", "--ref.num_gpus_per_node", "1"]
    argv += ["--algo.kl.use_loss", "--algo.kl.estimator", "k3", "--algo.kl.init_coef", "0.01"]
    argv += ["--actor.entropy_coef", "0.001", "--algo.advantage.is_correction_level", "token"]
    argv += ["--reward.overlong_buffer_len", "4", "--algo.dynamic_filtering_enable", "--vllm.sync_checksum"]
    argv += ["--data.max_samples", "32", "--rollout.micro_batch_size", "4"]
    run = _run_twice(argv, tiny_model, tmp_path)
    for step in run.steps:  # a rollout that the data set's end leaves short is trained on too
        assert math.isfinite(step["policy_loss"]) and math.isfinite(step["kl"]) and step[names.ENTROPY_ALL] > 0
        # Two turns with an observation between them: fewer action tokens than the span from first to last.
        assert step[names.RESPONSE_LENGTH_MEAN] < step["response_length"]
        assert 0 < step["dynamic_filtering_pass_rate"] <= 100
        assert step[names.GROUPS_UNIFORM] == 0  # the filter lets none through


def _run_twice(argv: list[str], model: Path, folder: Path) -> Finished:
    """Both runs trained, and are the same in all but time and memory."""
    first, second = (_run([*argv, *DETERMINISTIC], folder / name) for name in ("first", "second"))
    steps = [step["step"] for step in first.steps]  # how many, the filter decides
    assert len(steps) >= 2 and steps == [*range(1, len(steps) + 1)]
    assert all(step["vllm_kl"] != 0 for step in first.steps)
    for one, other in zip(first.metrics, second.metrics, strict=True):
        assert _without_times(one) == _without_times(other)
    before = load_file(model / "model.safetensors")
    weights, again = (load_file(run.folder / "model" / "model.safetensors") for run in (first, second))
    assert weights.keys() == again.keys() >= before.keys()  # DeepSpeed's writes a tied head too
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert sum(not torch.equal(weights[name], before[name]) for name in before) > len(before) // 2
    return first


def _run(argv: list[str], folder: Path) -> Finished:
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    own = {"--ckpt.output_dir": "model", "--ckpt.path": "checkpoints", "--logger.metrics_path": "metrics.jsonl"}
    run = finish([*argv, *(str(word) for flag, name in own.items() for word in (flag, folder / name))], folder)
    assert run.code == 0, run.log[-4000:]
    return run


def _without_times(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in entry.items() if not name.startswith(TIMES)}


AGENT = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class Agent(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def reset(self, states, **kwargs):
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
