"""One node of a Ray cluster, in the foreground: `ray start --block`, keeping its logs and clearing its processes."""

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

# Ray's Prometheus servers listen on all interfaces and ask for no token. Those of its head cannot be switched off, but
# they do not start on an invalid port, which is logged (ray 2.55.0, dashboard/head.py, _setup_metrics, and
# autoscaler/v2/monitor.py). Can go once the servers can be switched off, or ask for the token.
_NO_METRICS_SERVERS = {
    "RAY_enable_metrics_collection": "0",
    "DASHBOARD_METRIC_PORT": "65536",
    "AUTOSCALER_METRIC_PORT": "65536",
}

# For a head that loads from a slow disk: for how many seconds its dashboard waits for each of its parts. After Ray's
# 30 it ends, and nobody can submit a job (ray 2.55.0, dashboard/consts.py).
_PATIENCE = {
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "600",
}

# Ray gives its agents 15 s to start. They import much, and a cold disk or a busy host may take longer
# (https://github.com/ray-project/ray/issues/65983 will end this). The node gets 30 s until the head knows it (ray
# 2.55.0, _private/node.py); a busy head may take longer.
_AGENT_WAS_SLOW = b"Timed out waiting for file"

# A `ray start` that took longer than this has waited in vain: 30 s for the head to know the node, or 40 s for a head
# that is ready. It asks only the first head that answers. If that one is started again, because its agent was slow, it
# refuses the node ("WrongClusterID"). A mistake in the command line is reported at once.
_WAITED = 30.0

# Seconds without a connection to the head. Ray would go on for a minute after its death, and nobody restarts it.
_HEAD_IS_GONE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3"}


@dataclass(frozen=True)
class Node:
    """One node of a Ray cluster, as `ray start` gets it.

    Fields:
        name: in messages and in Ray's lists.
        address: of this host, as the others reach it.
        head: HOST:PORT of the cluster's head; None if this node is the head.
        port: of the head for the other nodes; the dashboard, Ray's clients and the agent of runtime environments have
            the next three.
        temporary: folder on a disk of this host, in which Ray's files get their own; short, for Unix sockets.
        more: further flags of `ray start`, which come last and win.
        patience: seconds for which it is started again, if it is too slow for Ray or finds no head that is ready.
    """

    name: str
    address: str
    head: str | None
    port: int
    temporary: Path
    more: Sequence[str] = ()
    patience: float = 600.0

    def command(self, folder: Path) -> list[str]:
        """`ray start` with its flags, and its files in ``folder``. The dashboard listens on the loopback only."""
        command = ["ray", "start", "--block", f"--node-ip-address={self.address}", f"--node-name={self.name}"]
        command += [f"--temp-dir={folder}"]
        # Fixed ports would collide with those of another cluster on the same host.
        command += ["--dashboard-agent-listen-port=0", "--min-worker-port=0", "--max-worker-port=0"]
        if self.head is None:
            command += ["--head", f"--port={self.port}", "--dashboard-host=127.0.0.1", "--disable-usage-stats"]
            command += [f"--dashboard-port={self.port + 1}", f"--ray-client-server-port={self.port + 2}"]
            # Without this flag, the server for Ray clients asks the node for the number. It ends if a busy host starts
            # the node over 30 s later, and `ray start --block` with it (ray 2.55.0, util/client/server/proxier.py).
            command += [f"--runtime-env-agent-port={self.port + 3}"]
        else:
            command += [f"--address={self.head}"]
        return [*command, *self.more]


def make_token(path: Path) -> None:
    """Write a new secret that only this user can read, unless there is one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
        stream.write(secrets.token_hex(32))


def with_token(environment: Mapping[str, str], token: Path | None) -> dict[str, str]:
    """A copy of ``environment`` in which Ray requires the token, because it listens on every interface."""
    if token is None:
        return dict(environment)
    others = {name: value for name, value in environment.items() if name != "RAY_AUTH_TOKEN"}  # Ray would prefer it
    return {**others, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token.absolute())}


def close_own_ray(environment: MutableMapping[str, str]) -> None:
    """Close the Ray that this process starts: it answers only this process and its workers, or whoever has the token
    in the environment, serves no metrics and ends with its head. Call this before Ray is imported, because Ray reads
    ``environment`` once (2.55.0). RAY_AUTH_MODE=disabled leaves Ray open; a cluster that RAY_ADDRESS names stays as it
    was started."""
    if environment.get("RAY_ADDRESS") or environment.get("RAY_AUTH_MODE") == "disabled":
        return
    environment.update({**_NO_METRICS_SERVERS, **_HEAD_IS_GONE, **environment})
    if not environment.get("RAY_AUTH_MODE"):
        environment.update({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})


def run_node(node: Node, token: Path | None, logs: Path | None) -> int:
    """Run this node until Ray or a signal ends it; returns the exit status. The node is started again if it, or its
    head, was too slow for Ray. Its processes may open many files.

    Args:
        token: the cluster's secret; None leaves the cluster open.
        logs: folder to which Ray's own logs of this node are copied at the end; None for no copy.

    Raises:
        OSError: `ray` is not on PATH, or a folder or a log cannot be written.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As ray.init does, and `ray start` does not (ray 2.55.0, _private/worker.py).
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    ends: list[int] = []  # requests that come once Ray has ended, as a job script repeats them
    before = signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    try:
        connect = {"RAY_py_gcs_connect_timeout_s": f"{node.patience:.0f}"}  # until the head answers, ready or not
        environment = {**_NO_METRICS_SERVERS, **_PATIENCE, **connect, **with_token(os.environ, token)}
        first = time.monotonic()
        while True:
            began = time.monotonic()
            # Run it, keep its logs, and see in them whether Ray's own limits ended it.
            with tempfile.TemporaryDirectory(prefix="ray", dir=node.temporary, ignore_cleanup_errors=True) as folder:
                status = run_and_clear(node.command(Path(folder)), environment)
                session = Path(folder, "session_latest", "logs")
                if logs is not None and session.is_dir():
                    shutil.copytree(session, logs, dirs_exist_ok=True, ignore_dangling_symlinks=True)
                errors, waited = session / "raylet.err", time.monotonic() - began > _WAITED
                has_run = (session / "ray_process_exit.log").exists()  # `ray start --block` tells what ended
                slow = errors.is_file() and (_AGENT_WAS_SLOW in errors.read_bytes() or (waited and not has_run))
                unmet = node.head is not None and not errors.is_file() and waited
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
