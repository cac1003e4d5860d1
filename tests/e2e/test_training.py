"""Whole runs on a tiny model: would catch a lost step, a stale weight, a mode that no longer works with our estimators."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from openrlhf_gtpo.report import names
from tests.e2e.conftest import Finished, finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def _assert_trained(run: Finished, model: Path, steps: int = 2) -> None:
    assert run.code == 0, run.log[-4000:]
    assert [entry["step"] for entry in run.steps] == list(range(1, steps + 1))
    before, after = load_file(model / "model.safetensors"), load_file(run.folder / "model" / "model.safetensors")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) > len(before) // 2


def test_multi_turn_agent_with_two_data_parallel_actors(trainer_argv, tiny_model, tmp_path) -> None:
    agent = tmp_path / "agent.py"
    agent.write_text(AGENT)
    argv = [*trainer_argv, "--algo.advantage.estimator", "gtpo", "--train.agent_func_path", str(agent)]
    argv += ["--actor.num_gpus_per_node", "2", "--train.micro_batch_size", "4", "--rollout.micro_batch_size", "4"]
    run = finish(argv, tmp_path)
    _assert_trained(run, tiny_model)
    for step in run.steps:
        assert step[names.ENTROPY_ALL] > 0
        # Two turns with an observation between them: fewer action tokens than the span from first to last.
        assert step[names.RESPONSE_LENGTH_MEAN] < step["response_length"]


def test_sequence_credit_with_every_option_of_upstream(trainer_argv, tiny_model, tmp_path) -> None:
    argv = [*trainer_argv, "--algo.advantage.estimator", "grpo_s", "--train.dynamic_batch_enable"]
    argv += ["--train.max_tokens_per_gpu", "256", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"]
    argv += ["--algo.kl.init_coef", "0.01", "--ref.num_gpus_per_node", "1", "--actor.dual_clip", "3"]
    argv += ["--actor.entropy_coef", "0.001", "--algo.advantage.is_correction_level", "token"]
    argv += ["--reward.overlong_buffer_len", "4", "--algo.dynamic_filtering_enable", "--train.colocate_all"]
    argv += ["--vllm.sync_checksum", "--vllm.enable_prefix_caching"]
    # The task's scorer gives partial credit, which upstream's filter takes for a difference; here right is 1, wrong 0.
    reward = tmp_path / "reward.py"
    reward.write_text(BINARY_REWARD)
    # At 1e-3 the policy may soon want to end at once, which OpenRLHF does not let the engine do: see test_megatron.py.
    argv += ["--reward.remote_url", str(reward), "--data.max_samples", "32", "--actor.adam.lr", "3e-4"]
    run = finish(argv, tmp_path)
    assert run.code == 0, run.log[-4000:]
    # A rollout that the data set's end leaves short of one training batch is logged, but not trained on.
    trained = [step for step in run.steps if "policy_loss" in step]
    assert trained
    for step in trained:
        assert math.isfinite(step["policy_loss"]) and math.isfinite(step["kl"]) and "vllm_kl" in step
        assert step["dynamic_filtering_pass_rate"] < 1000
        # Filtered groups are mixed, so none is uniform; vLLM and the trainer agree on what was sampled.
        assert step[names.GROUPS_UNIFORM] == 0 and abs(step["vllm_kl"]) < 0.05


def test_estimator_of_upstream_runs_as_there(trainer_argv, tiny_model, tmp_path) -> None:
    run = finish([*trainer_argv, "--algo.advantage.estimator", "group_norm", "--logger.entropy_enable"], tmp_path)
    _assert_trained(run, tiny_model)
    assert all(step[names.ENTROPY_ALL] > 0 and names.SHARES_STD not in step for step in run.steps)


@pytest.mark.parametrize(
    ("body", "message"),
    [("raise RuntimeError('grader is down')", "Prompt"), ("return {'rewards': float('nan')}", "not finite")],
)
def test_reward_that_fails_stops_the_run_with_the_prompt(trainer_argv, tmp_path, body, message) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(f"def reward_func(queries, prompts, labels):\n    {body}\n")
    argv = [*trainer_argv, "--algo.advantage.estimator", "gtpo", "--reward.remote_url", str(reward)]
    run = finish(argv, tmp_path)
    assert run.code == 1
    last = run.log.strip().splitlines()[-1]
    assert last.startswith("train_ppo_ray stopped:") and message in last and "multiplication" in last
    assert not (tmp_path / "metrics.jsonl").read_text() and not (tmp_path / "model").exists()


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

BINARY_REWARD = """
from openrlhf_gtpo.tasks.reasoning_gym_reward import reward_func as graded


def reward_func(queries, prompts, labels):
    right = float(graded(queries, prompts, labels)["rewards"] >= 1)
    return {"rewards": right, "scores": right, "extra_logs": {}}
"""
