"""A run that is asked to stop, on DeepSpeed (tests/e2e/test_slurm_training.py has Megatron): would catch a request that is
not heard, a checkpoint that is not there, and a resumed run that does a step twice or stops again.
"""

import os
import signal
import subprocess
import sys

import pytest

from openrlhf_gtpo.integration.controller.checkpoint_disk import checkpoint_bytes, parameters_of
from tests.e2e.conftest import Finished, finish
from tests.e2e.holding import Hold
from tests.slurm_cluster import until

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_sigusr1_saves_and_the_same_command_goes_on(trainer_argv, tiny_model, tmp_path) -> None:
    hold = Hold(tmp_path)
    hold.after(1)
    argv = [*trainer_argv, "--algo.advantage.estimator", "gtpo", "--data.max_samples", "16"]
    argv += ["--reward.remote_url", str(hold.reward), "--ckpt.load_enable"]
    argv += ["--train.colocate_all", "--vllm.enable_prefix_caching", "--vllm.sync_checksum"]
    # At 1e-3 the policy may soon want to end at once, which OpenRLHF does not let the engine do: see test_megatron.py.
    argv += ["--algo.advantage.is_correction_level", "token", "--actor.adam.lr", "3e-4"]
    argv += ["--ckpt.best_metric_key", "none"]  # and --ckpt.save_steps -1: no checkpoint but that one
    # What a run leaves that died in its first checkpoint.
    (tmp_path / "checkpoints" / "_actor" / "global_step2").mkdir(parents=True)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(
            [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", *argv],
            cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        stopped = Finished(0, "", tmp_path)
        metrics = tmp_path / "metrics.jsonl"
        try:
            until(
                lambda: metrics.exists() and metrics.read_text().count("\n") >= 1 or run.poll() is not None,
                600,
                "a step",
            )
            run.send_signal(signal.SIGUSR1)
            until(lambda: (tmp_path / "checkpoints" / "stop").exists() or run.poll() is not None, 100, "the request")
            hold.release()
            code = run.wait(timeout=300)
        finally:
            run.kill()
    text = (tmp_path / "log").read_text()
    assert code == 75, text[-4000:]
    last = stopped.steps[-1]["step"]
    assert last == 2  # the one in progress
    assert f"train_ppo_ray stopped: asked to, after step {last}, which is saved" in text.strip().splitlines()[-1]
    saved = tmp_path / "checkpoints" / "_actor" / f"global_step{last}"
    size = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    estimate = checkpoint_bytes(parameters_of(str(tiny_model)))  # from below, and not by much
    assert estimate <= size < 1.5 * estimate

    (tmp_path / "checkpoints" / "stop").touch()  # one that came too late for the first run
    resumed = finish(argv, tmp_path)
    assert resumed.code == 0, resumed.log[-4000:]
    assert [step["step"] for step in resumed.steps] == [1, 2, 3, 4]
    # vLLM and the trainer agree on what was sampled, before the stop and after it.
    assert all(abs(step["vllm_kl"]) < 0.05 for step in resumed.steps)
