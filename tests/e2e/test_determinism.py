"""Two runs with the same seed and ``--train.full_determinism_enable`` are the same run, bit by bit, on a host without CUDA.

Each is a run that shows more: a multi-turn agent with two data-parallel actors, and an estimator of OpenRLHF's on Megatron.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.report import names
from tests.e2e.conftest import Finished, finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

DETERMINISTIC = ["--train.full_determinism_enable", "--train.seed", "7", "--actor.adam.lr", "3e-4"]
DETERMINISTIC += ["--algo.advantage.is_correction_level", "token", "--rollout.micro_batch_size", "4"]
TIMES = ("time", names.TIMING_PREFIX, names.TOKENS_PER_SECOND_PREFIX, names.PEAK_MEMORY_PREFIX)


def test_a_multi_turn_agent_with_two_data_parallel_actors(trainer_argv, tiny_model, tmp_path) -> None:
    argv = [
        "--algo.advantage.estimator",
        "gtpo",
        "--train.agent_func_path",
        "agent.py",
        "--train.micro_batch_size",
        "4",
    ]
    run = _run_twice([*trainer_argv, *argv, "--actor.num_gpus_per_node", "2"], tiny_model, tmp_path)
    for step in run.steps:
        assert step[names.ENTROPY_ALL] > 0
        # Two turns with an observation between them: fewer action tokens than the span from first to last.
        assert step[names.RESPONSE_LENGTH_MEAN] < step["response_length"]


def test_an_estimator_of_upstream_on_megatron(trainer_argv, tiny_model, tmp_path) -> None:
    argv = ["--algo.advantage.estimator", "group_norm", "--logger.entropy_enable", "--actor.backend", "megatron"]
    argv += ["--train.max_tokens_per_gpu", "128", "--train.batch_size", "8"]
    run = _run_twice([*trainer_argv, *argv], tiny_model, tmp_path)
    assert all(step[names.ENTROPY_ALL] > 0 and names.SHARES_STD not in step for step in run.steps)


def _run_twice(argv: list[str], model: Path, folder: Path) -> Finished:
    """Two steps each; both runs trained, and are the same in all but time and memory."""
    first, second = (_run([*argv, *DETERMINISTIC], folder / name) for name in ("first", "second"))
    assert [step["step"] for step in first.steps] == [1, 2] and all(step["vllm_kl"] != 0 for step in first.steps)
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
