"""Waits until all nodes of a Ray cluster have joined and the cluster accepts jobs, over its dashboard's HTTP API."""

import json
import math
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PAUSE = 1.0  # seconds between two checks


class NotJoined(RuntimeError):
    """The cluster was not complete in time. The message names what is missing."""


class Dashboard:
    """The dashboard of a cluster's head.

    Args:
        url: such as http://127.0.0.1:8265.
        token: the cluster's secret file; None for an open cluster.
    """

    def __init__(self, url: str, token: Path | None) -> None:
        self._url = url.rstrip("/")
        self._token = token

    def alive(self) -> set[str]:
        """Return the names of the nodes that are up; empty if the head does not answer yet."""
        try:
            answer = self._ask("/api/v0/nodes?limit=10000")
            return {node["node_name"] for node in answer["data"]["result"]["result"] if node["state"] == "ALIVE"}
        except (OSError, ValueError, KeyError, TypeError):
            return set()

    def obstacle_to_jobs(self, deadline: float = math.inf) -> str | None:
        """Submit a job that does nothing, and say what keeps the cluster from running it; None if it succeeds before
        ``deadline`` (of ``time.monotonic``)."""
        try:
            job = self._ask("/api/jobs/", {"entrypoint": "true"})["submission_id"]
            while (status := self._ask(f"/api/jobs/{job}")["status"]) in ("PENDING", "RUNNING"):
                if time.monotonic() > deadline:
                    return f"a job that does nothing is still {status}"
                time.sleep(_PAUSE)
            return None if status == "SUCCEEDED" else f"a job that does nothing ended as {status}"
        except urllib.error.HTTPError as error:
            return " ".join(error.read().decode(errors="replace").split())[-300:]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return str(error)

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token.read_text(encoding='ascii').strip()}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data=data, headers=headers)
        # Bypass the environment's proxy, because the dashboard is on this host.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as response:
            return json.load(response)


def wait_for_nodes(dashboard: Dashboard, names: Sequence[str], seconds: float) -> None:
    """Return once all of ``names`` have joined and a job has run.

    Raises:
        NotJoined: ``seconds`` have passed.
    """
    deadline = time.monotonic() + seconds
    while missing := set(names) - (alive := dashboard.alive()):
        if time.monotonic() > deadline:
            if not alive:
                raise NotJoined(f"After {seconds:g} s the head of the Ray cluster does not answer; see its log.")
            raise NotJoined(
                f"After {seconds:g} s {len(missing)} of {len(names)} nodes have not joined the Ray cluster: "
                f"{', '.join(sorted(missing, key=names.index))}; see their logs. Often they cannot reach the head's "
                "address."
            )
        time.sleep(_PAUSE)
    while (obstacle := dashboard.obstacle_to_jobs(deadline)) is not None:
        if time.monotonic() > deadline:
            raise NotJoined(f"All {len(names)} nodes joined, but after {seconds:g} s Ray runs no job: {obstacle}")
        time.sleep(_PAUSE)
