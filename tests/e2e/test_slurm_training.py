"""The Megatron actor in a real SLURM, on two nodes of this machine: the engine samples from the trained weights, and a
job that loses a node is requeued and goes on from its checkpoint, at another layout.

tests/tools/launch/test_slurm.py shows without training that a request to stop requeues a job too, and that a folder
which one node does not share is reported; test_stop.py shows what the trainer makes of the request.
"""

import math
import shlex
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import read_dump
from tests.e2e.conftest import Finished
from tests.support.holding import Hold
from tests.support.slurm_cluster import SlurmCluster, until
from tests.tools.launch.conftest import Job, cluster, submit  # noqa: F401  # a fixture

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

# What the train_*.sh scripts do with --submit: they submit a Ray job, with the flags after -- at the end. Here some
# flags differ once the job is requeued.
LAUNCHER = """
while [[ "$1" != --submit ]]; do shift; done
if ((SLURM_RESTART_COUNT == 0)); then own=({first}); else own=({requeued}); fi
exec ray job submit --address "$2" -- python3 -m openrlhf_gtpo.cli.train_ppo_ray {argv} "${{own[@]}}" "${{@:4}}"
"""
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
TP2 = ["--megatron.tensor_model_parallel_size", "2", "--megatron.sequence_parallel"]
PP2 = ["--megatron.pipeline_model_parallel_size", "2"]


def _latest(folder: Path) -> int:
    path = folder / "checkpoints" / "_actor" / "latest"
    return int(path.read_text().strip().removeprefix("global_step")) if path.exists() else 0


def _train_log(job: Job, attempt: int) -> str:
    return (job.folder / "run" / "slurm" / f"{job.number}-{attempt}" / "train.log").read_text()


def _kill_ray(job: Job, node: str) -> None:
    """As when a node loses power: none of its processes ends in an orderly way."""
    words = ["openrlhf_gtpo.cli.ray_cluster", "worker", "--name", node]
    found = [process for process in job.processes() if set(words) <= set(process.info["cmdline"] or [])]
    assert found
    for one in found:
        with suppress(psutil.NoSuchProcess):
            for process in [one, *one.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_job_that_loses_a_node_goes_on_at_another_layout(
    cluster: SlurmCluster, trainer_argv: list[str], tmp_path: Path  # noqa: F811
) -> None:
    """Upstream's GRPO with a reference model at TP2; requeued at PP2, with the initial model as a guide. Each step's
    rollout log-probs come from the engine.

    OpenRLHF asks the engine for at least one token, so the engine's first log-prob is that of a distribution without
    the end token. At a learning rate of 1e-3 the policy soon wants to end at once, and the trainer's and the engine's
    log-probs differ for that reason.
    """
    hold = Hold(tmp_path)
    hold.after(5)
    argv = [*trainer_argv, "--algo.preset", "grpo", "--logger.entropy_enable", "--reward.remote_url", str(hold.reward)]
    argv += ["--data.max_samples", "12", "--train.num_episodes", "2", "--rollout.n_samples_per_prompt", "16"]
    argv += ["--train.batch_size", "64", "--actor.num_gpus_per_node", "2", "--actor.adam.lr", "3e-4"]
    argv += ["--actor.backend", "megatron", "--train.max_tokens_per_gpu", "128", "--megatron.async_save"]
    argv += ["--algo.advantage.is_correction_level", "token", "--ckpt.save_steps", "3"]
    argv += ["--ckpt.best_metric_key", "none"]
    first = [*TP2, "--ref.num_gpus_per_node", "2", "--algo.kl.init_coef", "0.1", "--vllm.sync_checksum"]
    guide = ["--algo.guide.model_name_or_path", argv[argv.index("--actor.model_name_or_path") + 1]]
    guide += ["--algo.guide.fraction", "0.25", "--logger.dump_rollouts", "1"]
    launcher = tmp_path / "launcher.sh"
    parts = {"first": first, "requeued": [*PP2, *guide], "argv": argv}
    launcher.write_text(LAUNCHER.format(**{name: shlex.join(words) for name, words in parts.items()}))
    # Neither node has enough GPUs for the whole run.
    job = submit(cluster, tmp_path, launcher, MAX_REQUEUES="1", RAY_FLAGS="--num-gpus=3 --num-cpus=8", **QUIET)
    run = Finished(0, "", tmp_path)

    def steps() -> list[int]:
        return [step["step"] for step in run.steps] if (tmp_path / "metrics.jsonl").exists() else []

    until(lambda: steps()[-1:] == [5] and _latest(tmp_path) or job.ended(), 600, "steps behind a checkpoint")
    assert _latest(tmp_path) == 3, job.everything
    cluster.kill_node("n2")
    _kill_ray(job, "n2")
    until(lambda: cluster.restarts(job.number) == 1, 600, "a requeue after the loss of a node")
    assert "Ray on the node n2 has ended" in job.log
    hold.release()
    cluster.start_node("n2")

    until(lambda: job.ended(), 600, "the end of the job")
    assert job.state() == "COMPLETED", job.everything
    assert f"Loading the checkpoint {tmp_path}/checkpoints/_actor/global_step3" in _train_log(job, 1)
    assert steps() == [1, 2, 3, 4, 5, 4, 5, 6]
    assert (tmp_path / "model" / "model.safetensors").exists()
    n2 = tmp_path / "run" / "slurm" / f"{job.number}-1" / "n2-ray"
    assert any("actor_name:" in path.read_text(errors="replace") for path in n2.glob("worker-*.out")), job.everything
    until(lambda: not job.processes(), 600, "its steps end")

    before, requeued = run.steps[:5], run.steps[5:]
    assert all(step[names.ENTROPY_ALL] > 0 and names.SHARES_STD not in step for step in run.steps)
    assert before[0]["kl"] == pytest.approx(0, abs=1e-6)  # the reference is the policy, until it is trained
    assert all(step["kl"] > 1e-4 and math.isfinite(step["policy_loss"]) for step in before[1:])
    # Within bf16's rounding of the engine's log-probs: 0.0005 here. The reference is like an engine never updated.
    distances = [abs(step["vllm_kl"]) for step in before]
    assert sum(distances) / 5 < 0.008, distances
    assert sum(distances[1:]) < sum(step["kl"] for step in before[1:]) / 4
    assert [step["actor_lr"] for step in requeued[:2]] == pytest.approx([step["actor_lr"] for step in before[3:]])
    for step in requeued:
        assert abs(step["vllm_kl"]) < 0.02 and math.isfinite(step["policy_loss"])
        assert step[names.GUIDE_ROWS] == pytest.approx(0.25)
    dumps = sorted((tmp_path / "checkpoints" / "rollouts").iterdir())
    assert len(dumps) == 3
    dump = read_dump(dumps[-1]).columns
    assert dump["guided"].tolist() == ([False] * 12 + [True] * 4) * 4
    ratios, mask = dump["ratio"], dump["mask"].values
    rows = np.repeat(dump["guided"], np.diff(ratios.offsets))
    of_guide, own = (np.abs(np.log(ratios.values[mask & one])).mean() for one in (rows, ~rows))
    assert of_guide > 2 * own and ratios.values[rows].max() <= 2.01  # the policy has left the guide; the cap holds
