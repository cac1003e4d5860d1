"""``ray job submit`` with a command of ours: would catch a driver that cannot join the cluster that started it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
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
def cluster() -> Iterator[str]:
    """A head node with two logical GPUs; the address of its dashboard. Ends with the processes it started, no others."""
    port, dashboard, agent = _free_port(), _free_port(), _free_port()
    with tempfile.TemporaryDirectory(
        prefix="ray", ignore_cleanup_errors=True
    ) as folder:  # Unix sockets need a short path
        head = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--num-gpus=2", "--num-cpus=6", "--node-ip-address=127.0.0.1"]
            + [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
            + [f"--temp-dir={folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_worker_niceness": "0"},
        )
        yield f"http://127.0.0.1:{dashboard}"
        head.terminate()
        head.wait(timeout=60)


def test_submitted_job_trains(cluster: str, trainer_argv: list[str], tmp_path: Path) -> None:
    command = [RAY, "job", "submit", "--address", cluster, "--"]
    command += [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", "--algo.advantage.estimator", "gtpo"]
    for _ in range(60):
        run = finish(trainer_argv, tmp_path, command=command)
        if "Failed to connect" not in run.log and "No available agent" not in run.log:
            break
        time.sleep(1)  # the head node's dashboard and its agent take some seconds to come up
    assert run.code == 0 and "succeeded" in run.log, run.log[-4000:]
    assert [entry["step"] for entry in run.steps] == [1, 2]
