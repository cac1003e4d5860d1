"""Runs one node of a Ray cluster in the foreground: `ray start --block`, kept logs, and no processes left behind."""

import os
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from openrlhf_gtpo.tools.launch.process_tree import run_and_clear

# Ray's Prometheus servers listen on all interfaces without a token. The head's servers cannot be switched off, but
# they fail to start on an invalid port, with a line in the log (ray 2.55.0, dashboard/head.py, _setup_metrics, and
# autoscaler/v2/monitor.py). Can go once the servers can be switched off, or require the token.
_NO_METRICS_SERVERS = {
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "65536",
    "AUTOSCALER_METRIC_PORT": "65536",
}

# Seconds that the dashboard waits for each of its parts, for a head that loads from a slow disk. After Ray's 30 s the
# dashboard exits, and nobody can submit a job (ray 2.55.0, dashboard/consts.py).
_PATIENCE = {
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "600",
}

# Ray gives its agents 15 s to start. They import a lot, and a cold disk or a busy host may take longer
# (https://github.com/ray-project/ray/issues/65983 will fix this). The node gets 30 s to register with the head (ray
# 2.55.0, _private/node.py), and a busy head may take longer.
_AGENT_WAS_SLOW = b"Timed out waiting for file"

# A failed `ray start` that took longer than this hit a timeout: 30 s to register the node, or 40 s for a ready head.
# (A mistake in the command line is reported at once.) A node only talks to the first head that answers. If that head
# restarts, because its agent was slow, it rejects the node ("WrongClusterID").
_WAITED = 30.0

# Seconds without a connection to the head. Ray would wait a minute for a dead head, but nobody restarts it.
_HEAD_IS_GONE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}


@dataclass(frozen=True)
class Node:
    """The settings of one node for `ray start`.

    Fields:
        name: the node's name in messages and in Ray's lists.
        address: this host's address for the others.
        head: HOST:PORT of the cluster's head; None if this node is the head.
        port: the head's port for the other nodes. The dashboard, Ray's clients and the agent of runtime environments
            use the next three.
        temporary: folder on a disk of this host for Ray's files; a short path, for Unix sockets.
        more: more flags of `ray start`, which come last and win.
        patience: seconds during which it is restarted, if it is too slow for Ray or finds no ready head.
    """

    name: str
    address: str
    head: str | None
    port: int
    temporary: Path
    more: Sequence[str] = ()
    patience: float = 600.0

    def command(self, folder: Path) -> list[str]:
        """Return `ray start` with its flags, and its files in ``folder``. The dashboard listens only on the
        loopback."""
        command = ["ray", "start", "--block", f"--node-ip-address={self.address}", f"--node-name={self.name}"]
        command += [f"--temp-dir={folder}"]
        # Fixed ports would collide with another cluster on the same host.
        command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        if self.head is None:
            command += ["--head", f"--port={self.port}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
            command += [f"--dashboard-port={self.port + 1}", f"--ray-client-server-port={self.port + 2}"]
            # Without this flag, the server for Ray clients asks the node. If a busy host starts that over 30 s later,
            # the server exits, and `ray start --block` with it (ray 2.55.0, util/client/server/proxier.py).
            command += [f"--runtime-env-agent-port={self.port + 3}"]
        else:
            command += [f"--address={self.head}"]
        return [*command, *self.more]


def make_token(path: Path) -> None:
    """Write a new secret that only this user can read, unless the file exists."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))


def with_token(environment: Mapping[str, str], token: Path | None) -> dict[str, str]:
    """Return a copy of ``environment`` in which Ray requires the token, because Ray listens on every interface."""
    if token is None:
        return dict(environment)
    others = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}  # Ray would prefer it
    return {**others, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}


def close_own_ray(environment: MutableMapping[str, str]) -> None:
    """Secure the Ray that this process will start: it answers only this process and its workers, or clients with the
    token in the environment, serves no metrics, and ends with its head. Call this before importing Ray, which reads
    ``environment`` once (2.55.0). RAY_AUTH_MODE=disabled leaves Ray open. A cluster named by RAY_ADDRESS stays as it
    was started."""
    if environment.get("RAY_ADDRESS") or environment.get("RAY_AUTH_MODE") == "disabled":
        return
    environment.update({**_NO_METRICS_SERVERS, **_HEAD_IS_GONE, **environment})
    if not environment.get("RAY_AUTH_MODE"):
        environment.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})


def run_node(node: Node, token: Path | None, logs: Path | None) -> int:
    """Run this node until Ray or a signal ends it; return the exit status. Restarts the node if it, or its head, was
    too slow for Ray. Raises the limit of open files for its processes.

    Args:
        token: the cluster's secret; None leaves the cluster open.
        logs: folder for a copy of this node's Ray logs at the end; None for no copy.

    Raises:
        OSError: `ray` is not on PATH, or a folder or a log cannot be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # ray.init does this, but `ray start` does not (ray 2.55.0, _private/worker.py).
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    ends: list[int] = []  # later signals, which a job script repeats after Ray has ended
    before = signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    try:
        connect = {"RAY_py_gcs_connect_timeout_s": f"{node.patience:.0f}"}  # until any head answers, ready or not
        environment = {**_NO_METRICS_SERVERS, **_PATIENCE, **connect, **with_token(os.environ, token)}
        first = time.monotonic()
        while True:
            began = time.monotonic()
            # Run the node, keep its logs, and search them for a timeout of Ray's.
            with tempfile.TemporaryDirectory(prefix="ray", dir=node.temporary, ignore_cleanup_errors=True) as folder:
                status = run_and_clear(node.command(Path(folder)), environment)
                session = Path(folder, "session_latest", "logs")
                if logs is not None and session.is_dir():
                    shutil.copytree(session, logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                errors, waited = session / "raylet.err", time.monotonic() - began > _WAITED
                has_run = (session / "ray_process_exit.log").exists()  # `ray start --block` prints what ended
                slow = errors.is_file() and (_AGENT_WAS_SLOW in errors.read_bytes() or (waited and not has_run))
                unmet = node.head is not None and not errors.is_file() and waited
            # Restart only if Ray was too slow or found no ready head, while there is patience left.
            if status != 1:
                return status
            if ends:
                return 128 + ends[0]
            if not (unmet or slow) or time.monotonic() - first >= node.patience:
                return status
            why = f"there is no head at {node.head} that is ready"
            if slow:
                why = "Ray was too slow for its own limits of 15 s for its agent and 30 s for the node"
            print(f"Node {node.name}: {why}; trying again.", file=sys.stderr)
    finally:
        signal.signal(signal.SIGTERM, before)
