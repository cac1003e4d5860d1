"""``ray job submit`` with a command of ours: would catch a driver that cannot join the cluster that started it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
RAY = str(Path(sys.executable).with_name("ray"))


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[str]:
    """A head node with two logical GPUs; the address of its dashboard. Ends with the processes it started, no others."""
    port, dashboard = _free_port(), _free_port()
    head = subprocess.Popen(
        [RAY, "start", "--head", "--block", "--num-gpus=2", "--num-cpus=6", "--node-ip-address=127.0.0.1"]
        + [f"--port={port}", f"--dashboard-port={dashboard}", f"--temp-dir={tmp_path / 'r'}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        env=os.environ | {"RAY_worker_niceness": "0"},
    )
    yield f"http://127.0.0.1:{dashboard}"
    head.terminate()
    head.wait(timeout=60)


def test_submitted_job_trains(cluster: str, trainer_argv: list[str], tmp_path: Path) -> None:
    for _ in range(60):
        listed = subprocess.run([RAY, "job", "list", "--address", cluster], capture_output=True, timeout=60)
        if listed.returncode == 0:
            break
    assert listed.returncode == 0, listed.stderr[-2000:]
    command = [RAY, "job", "submit", "--address", cluster, "--"]
    command += [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", "--algo.advantage.estimator", "gtpo"]
    run = finish(trainer_argv, tmp_path, command=command)
    assert run.code == 0 and "succeeded" in run.log, run.log[-4000:]
    assert [entry["step"] for entry in run.steps] == [1, 2]
