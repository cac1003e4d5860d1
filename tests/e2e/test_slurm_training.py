"""Training in a real SLURM, on two nodes of this machine: a job that loses a node is requeued and goes on.

That a request to stop requeues it too, and that a folder which one node does not share is told, is shown without
training, in tests/launch/test_slurm.py, and what the trainer makes of the request in test_stop.py.
"""

import json
import shlex
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.holding import Hold
from tests.launch.conftest import Job, cluster, submit  # noqa: F401  # a fixture
from tests.slurm_cluster import SlurmCluster, until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]

# What the train_*.sh scripts do with --submit: a job of Ray's, with the flags behind -- at the end.
LAUNCHER = """
while [[ "$1" != --submit ]]; do shift; done
exec ray job submit --address "$2" -- python3 -m openrlhf_gtpo.cli.train_ppo_ray {argv} "${{@:4}}"
"""
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
EPISODES, STEPS = 2, 8  # of four steps each


def _steps(folder: Path) -> list[int]:
    """Of the training, in the order of their lines."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines() if line] if path.exists() else []
    return [row["step"] for row in rows if row["kind"] == "train"]


def _latest(folder: Path) -> int:
    path = folder / "checkpoints" / "_actor" / "latest"
    return int(path.read_text().strip().removeprefix("global_step")) if path.exists() else 0


def _train_log(job: Job, attempt: int) -> str:
    return (job.folder / "run" / "slurm" / f"{job.number}-{attempt}" / "train.log").read_text()


def _kill_ray(job: Job, node: str) -> None:
    """As a node that loses its power does: no process of it ends in an orderly way."""
    words = ["openrlhf_gtpo.cli.ray_cluster", "worker", "--name", node]
    found = [process for process in job.processes() if set(words) <= set(process.info["cmdline"] or [])]
    assert found
    for one in found:
        with suppress(psutil.NoSuchProcess):
            for process in [one, *one.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


def test_a_job_that_loses_a_node_ends_with_every_step(
    cluster: SlurmCluster, trainer_argv: list[str], tmp_path: Path  # noqa: F811
) -> None:
    hold = Hold(tmp_path)
    hold.after(5)
    argv = [*trainer_argv, "--algo.advantage.estimator", "gtpo", "--data.max_samples", "16"]
    argv += ["--train.num_episodes", str(EPISODES), "--reward.remote_url", str(hold.reward)]
    argv += ["--actor.backend", "megatron", "--train.max_tokens_per_gpu", "128", "--megatron.async_save"]
    argv += ["--ckpt.save_steps", "3", "--ckpt.best_metric_key", "none", "--actor.adam.lr", "1e-4"]
    launcher = tmp_path / "launcher.sh"
    launcher.write_text(LAUNCHER.format(argv=shlex.join(argv)))
    # A GPU on each node, so that the policy is on one and the engine on the other.
    job = submit(cluster, tmp_path, launcher, MAX_REQUEUES="1", RAY_FLAGS="--num-gpus=1 --num-cpus=8", **QUIET)

    until(lambda: _steps(tmp_path)[-1:] == [5] and _latest(tmp_path) or job.ended(), 600, "steps behind a checkpoint")
    assert _latest(tmp_path) == 3, job.everything
    cluster.kill_node("n2")
    _kill_ray(job, "n2")
    until(lambda: cluster.restarts(job.number) == 1, 300, "a requeue after the loss of a node")
    assert "Ray on the node n2 has ended" in job.log
    hold.release()
    cluster.start_node("n2")

    until(lambda: job.ended(), 600, "the end of the job")
    assert job.state() == "COMPLETED", job.everything
    assert f"Loading the checkpoint {tmp_path}/checkpoints/_actor/global_step3" in _train_log(job, 1)
    assert _steps(tmp_path) == [1, 2, 3, 4, 5, *range(4, STEPS + 1)]
    assert (tmp_path / "model" / "model.safetensors").exists()
    n2 = tmp_path / "run" / "slurm" / f"{job.number}-1" / "n2-ray"
    assert any("actor_name:" in path.read_text(errors="replace") for path in n2.glob("worker-*.out")), job.everything
    until(lambda: not job.processes(), 100, "its steps end")
