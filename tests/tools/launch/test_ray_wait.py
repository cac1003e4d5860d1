"""The wait ends when all nodes have joined, or else in time, with the names of those missing. Ray is a stand-in."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.cli import ray_cluster
from openrlhf_gtpo.tools.launch import ray_node
from openrlhf_gtpo.tools.launch.ray_node import Node, make_token, with_token


class Head(ThreadingHTTPServer):
    """Answers like a dashboard: with the nodes so far, one more each time it is asked."""

    def __init__(self, joining: list[str], job: str = "SUCCEEDED", refusals: int = 0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.joining, self.job, self.refusals = joining, job, refusals
        self.nodes: Any = ()  # what it says instead
        self.asked, self.tokens = 0, set[str]()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Head

    def do_GET(self) -> None:
        self.server.tokens.add(self.headers["Authorization"] or "")
        if self.path.startswith("/api/jobs/"):
            self._answer(200, {"status": self.server.job})
            return
        self.server.asked += 1
        nodes = [{"node_name": name, "state": "ALIVE"} for name in self.server.joining[: self.server.asked]]
        nodes.append({"node_name": "n3", "state": "DEAD"})
        answer = nodes if self.server.nodes == () else self.server.nodes
        self._answer(200, {"data": {"result": {"result": answer}}})

    def do_POST(self) -> None:
        if self.server.refusals:
            self.server.refusals -= 1
            self._answer(500, {"message": "No available agent to submit job"})
            return
        self._answer(200, {"submission_id": "raysubmit_1"})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *unused: Any) -> None:
        """Print nothing."""


@pytest.fixture
def serve() -> Iterator[Any]:
    heads: list[Head] = []

    def start(*arguments: Any, **options: Any) -> Head:
        heads.append(Head(*arguments, **options))
        threading.Thread(target=heads[-1].serve_forever, daemon=True).start()
        return heads[-1]

    yield start
    for head in heads:
        head.shutdown()
        head.server_close()


def wait(url: str, *nodes: str, token: Path | None = None, timeout: str = "60") -> int:
    secret = [] if token is None else ["--token", str(token)]
    return ray_cluster.main(["wait", "--dashboard", url, "--timeout", timeout, *secret, "--nodes", *nodes])


def test_it_waits_for_every_node_and_for_a_job_that_ran(serve: Any, tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    head = serve(["n1", "n2"], refusals=1)
    assert wait(head.url, "n1", "n2", token=tmp_path / "token") == 0
    assert head.asked == 2 and head.refusals == 0
    assert head.tokens == {f"Bearer {(tmp_path / 'token').read_text()}"}


def test_nodes_that_do_not_come_are_named(serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    head = serve(["n1"])
    assert wait(head.url, "n1", "n2", "n3", timeout="1.5") == 1
    assert "After 1.5 s 2 of 3 nodes have not joined the Ray cluster: n2, n3;" in capsys.readouterr().err


def test_only_the_user_reads_the_secret_and_it_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "token"
    make_token(path)
    secret = path.read_text()
    make_token(path)
    assert path.read_text() == secret and len(secret) == 64 and path.stat().st_mode & 0o077 == 0
    with_path = {"A": "b", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}
    assert with_token({"A": "b", "RAY_AUTH_TOKEN": "which Ray would prefer"}, path) == with_path
    assert with_token({"A": "b"}, None) == {"A": "b"}


def test_no_flag_of_ours_opens_a_server_to_every_interface(tmp_path: Path) -> None:
    head = Node("n1", "10.0.0.1", None, 7000, tmp_path, ["--num-gpus=8"]).command(tmp_path)
    worker = Node("n2", "10.0.0.2", "10.0.0.1:7000", 7000, tmp_path).command(tmp_path)
    assert "--dashboard-host=127.0.0.1" in head and "--dashboard-port=7001" in head and head[-1] == "--num-gpus=8"
    assert "--runtime-env-agent-port=7003" in head and not any("agent-port=70" in word for word in worker)
    assert "--address=10.0.0.1:7000" in worker and "--head" not in worker
    assert not any("0.0.0.0" in word for word in head + worker)


def test_a_node_keeps_rays_logs_and_nothing_else(tmp_path: Path) -> None:
    """The stand-in for Ray writes where a session's logs are, beside a file of the user's.

    The node runs in its own process, because it ends all descendants of that process.
    """
    programs, temporary = tmp_path / "bin", tmp_path / "temporary"
    programs.mkdir()
    temporary.mkdir()
    (temporary / "notes").write_text("a user's notes")
    ray = programs / "ray"
    ray.write_text(
        "#!/bin/bash\nfor word; do [[ $word != --temp-dir=* ]] || folder=${word#*=}; done\n"
        "mkdir -p $folder/session_1/logs; ln -s session_1 $folder/session_latest\n"
        'echo "$RAY_AUTH_MODE" >$folder/session_1/logs/raylet.out; exit 3\n'
    )
    ray.chmod(0o755)
    words = ["head", "--address", "10.0.0.1", "--token", str(tmp_path / "token"), "--logs", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.ray_cluster", *words, "--temporary", str(temporary)]
    assert subprocess.run(command, env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}).returncode == 3
    assert (tmp_path / "logs" / "raylet.out").read_text() == "token\n"
    assert [path.name for path in temporary.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("said", "seconds", "has_run", "starts"),
    [
        ("Check failed: Timed out waiting for file /x", 15.0, False, 40),
        ("no space", 4.0, False, 1),
        ("the head does not know the node yet", 35.0, False, 18),
        ("killed", 3600.0, True, 1),
    ],
)
def test_a_node_that_was_too_slow_for_ray_is_started_again(
    said: str,
    seconds: float,
    has_run: bool,
    starts: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    folders: list[Path] = []
    clock = [0.0]

    def run(command: list[str], environment: dict[str, str]) -> int:
        [folder] = [Path(word.partition("=")[2]) for word in command if word.startswith("--temp-dir=")]
        assert not any(earlier.exists() for earlier in folders)
        folders.append(folder)
        (folder / "session_latest" / "logs").mkdir(parents=True)
        (folder / "session_latest" / "logs" / "raylet.err").write_text(said)
        if has_run:
            (folder / "session_latest" / "logs" / "ray_process_exit.log").touch()
        clock[0] += seconds
        return 1

    monkeypatch.setattr(ray_node, "run_and_clear", run)
    monkeypatch.setattr(ray_node, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert ray_node.run_node(Node("n2", "127.0.0.1", "127.0.0.1:6379", 6379, tmp_path), None, None) == 1
    assert len(folders) == starts
    assert capsys.readouterr().err.count("Node n2: Ray was too slow for its own limits") == starts - 1


def test_a_request_to_end_between_two_starts_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], environment: dict[str, str]) -> int:
        [folder] = [Path(word.partition("=")[2]) for word in command if word.startswith("--temp-dir=")]
        (folder / "session_latest" / "logs").mkdir(parents=True)
        (folder / "session_latest" / "logs" / "raylet.err").write_text("Check failed: Timed out waiting for file /x")
        os.kill(os.getpid(), signal.SIGTERM)  # before its files have been copied
        return 1

    monkeypatch.setattr(ray_node, "run_and_clear", run)
    assert ray_node.run_node(Node("n1", "127.0.0.1", None, 6379, tmp_path), None, None) == 128 + signal.SIGTERM
