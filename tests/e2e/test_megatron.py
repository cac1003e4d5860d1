"""Whole runs on the Megatron actor: the engine samples from the trained weights, and a checkpoint goes on where it
stopped, at another layout.
"""

import math

import numpy as np
import pytest

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import read_dump
from tests.e2e.conftest import finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

MEGATRON = ["--actor.backend", "megatron", "--train.max_tokens_per_gpu", "128"]
TP2 = ["--megatron.tensor_model_parallel_size", "2", "--megatron.sequence_parallel"]
PP2 = ["--megatron.pipeline_model_parallel_size", "2"]


def test_tp2_trains_what_the_engine_samples_from_and_resumes_as_pp2(trainer_argv, tmp_path) -> None:
    """Five steps of upstream's GRPO with a reference model; each step's rollout log-probs come from the engine.

    OpenRLHF asks the engine for at least one token, so its first log-prob is that of a distribution without the end
    token: at a learning rate of 1e-3 the policy soon wants to end at once, and the two differ for that reason.
    """
    argv = [*trainer_argv, *MEGATRON, "--algo.preset", "grpo", "--logger.entropy_enable", "--data.max_samples", "20"]
    argv += ["--algo.advantage.is_correction_level", "token", "--ckpt.save_steps", "2", "--ckpt.load_enable"]
    argv += ["--rollout.n_samples_per_prompt", "16", "--train.batch_size", "64", "--actor.adam.lr", "3e-4"]
    whole = [*argv, "--actor.num_gpus_per_node", "2", *TP2, "--ref.num_gpus_per_node", "2"]
    run = finish([*whole, "--algo.kl.init_coef", "0.1", "--vllm.sync_checksum"], tmp_path)
    assert run.code == 0, run.log[-4000:]
    assert [step["step"] for step in run.steps] == [1, 2, 3, 4, 5]
    assert all(step[names.ENTROPY_ALL] > 0 and names.SHARES_STD not in step for step in run.steps)
    assert run.steps[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy, until it is trained
    assert all(step["kl"] > 1e-4 and math.isfinite(step["policy_loss"]) for step in run.steps[1:])
    # Within bf16's rounding of the engine's log-probs: 0.0005 here. The reference is like an engine never updated.
    distances = [abs(step["vllm_kl"]) for step in run.steps]
    assert sum(distances) / 5 < 0.008, distances
    assert sum(distances[1:]) < sum(step["kl"] for step in run.steps[1:]) / 4
    assert (tmp_path / "model" / "model.safetensors").exists()

    saved = tmp_path / "checkpoints" / "_actor"
    assert (saved / "latest").read_text().strip() == "global_step4"
    # The model that all began from as a guide.
    guide = ["--algo.guide.model_name_or_path", argv[argv.index("--actor.model_name_or_path") + 1]]
    guide += ["--algo.guide.fraction", "0.25", "--logger.dump_rollouts", "1"]
    resumed = finish([*argv, "--actor.num_gpus_per_node", "2", *PP2, *guide], tmp_path)
    assert resumed.code == 0, resumed.log[-4000:]
    assert [step["step"] for step in resumed.steps] == [1, 2, 3, 4, 5, 5]  # one more, after the fourth
    again, first = resumed.steps[-1], resumed.steps[-2]
    assert again["actor_lr"] == pytest.approx(first["actor_lr"])
    assert abs(again["vllm_kl"]) < 0.02
    assert again[names.GUIDE_ROWS] == pytest.approx(0.25) and math.isfinite(again["policy_loss"])
    dump = read_dump(next((tmp_path / "checkpoints" / "rollouts").iterdir())).columns
    assert dump["guided"].tolist() == ([False] * 12 + [True] * 4) * 4
    ratios, mask = dump["ratio"], dump["mask"].values
    rows = np.repeat(dump["guided"], np.diff(ratios.offsets))
    of_guide, own = (np.abs(np.log(ratios.values[mask & one])).mean() for one in (rows, ~rows))
    assert of_guide > 2 * own and ratios.values[rows].max() <= 2.01  # the policy has moved from it, and the cap holds
