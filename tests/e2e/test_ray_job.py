"""``ray job submit`` with a command of ours: would catch a driver that cannot join the cluster that started it."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.conftest import finish

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]
RAY = str(Path(sys.executable).with_name("ray"))


def _free_ports(count: int) -> list[int]:
    """Different ones that nobody listens on at the moment."""
    with ExitStack() as open_sockets:
        sockets = [open_sockets.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]


class Head:
    """A head node with two logical GPUs. Ends with the processes it started, no others."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Returns before the node is up."""
        port, dashboard, client = _free_ports(3)  # that for clients is 10001 in every head node unless it is named
        self.address = f"http://127.0.0.1:{dashboard}"  # of its dashboard
        self._process = subprocess.Popen(
            [RAY, "start", "--head", "--block", "--num-gpus=2", "--num-cpus=6", "--node-ip-address=127.0.0.1"]
            + [f"--port={port}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
            + ["--dashboard-agent-listen-port=0", f"--temp-dir={self._folder}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_worker_niceness": "0"},
        )

    def ended(self) -> bool:
        """It ends itself where the machine was too busy: one of its servers waits half a minute for another."""
        return self._process.poll() is not None

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=200)


@pytest.fixture
def head() -> Iterator[Head]:
    # Unix sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        node = Head(folder)
        yield node
        node.stop()


def test_submitted_job_trains(head: Head, trainer_argv: list[str], tmp_path: Path) -> None:
    train = [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", "--algo.advantage.estimator", "gtpo"]
    deadline = time.monotonic() + 400
    while True:
        run = finish(trainer_argv, tmp_path, command=[RAY, "job", "submit", "--address", head.address, "--", *train])
        ended = head.ended()
        if "submitted successfully" in run.log and not ended:
            break
        # The node's dashboard and its agent take some seconds to come up, each with refusals of its own until then.
        assert time.monotonic() < deadline, run.log[-4000:]
        if ended:
            head.start()
        time.sleep(1)
    assert run.code == 0 and "succeeded" in run.log, run.log[-4000:]
    assert [entry["step"] for entry in run.steps] == [1, 2]
