"""A report of what a run waits for if Ray has no place for its processes. Ray itself waits forever, silently."""

import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.util.state import list_actors, list_jobs

from openrlhf_gtpo.errors import one_line
from openrlhf_gtpo.training.controller.failures import repeated

_PATIENCE, _AGAIN = 20.0, 300.0  # seconds until the first line, and from one to the next
_LIMIT = 10000  # actors; Ray's maximum


@contextmanager
def waits_reported(every: float = 5.0, patience: float = _PATIENCE) -> Iterator[None]:
    """Print a line when Ray has had no place for a process of this run for ``patience`` seconds, and then every five
    minutes: what the run needs, what the cluster has, and which jobs hold it. The run keeps waiting, because another
    run may end and an autoscaler may add nodes.

    Args:
        every: seconds between two looks.
    """
    job = ray.get_runtime_context().get_job_id()
    began = due = math.inf
    has_dashboard = True  # without one, Ray looks for it for 40 s each time

    def look() -> None:
        nonlocal began, due, has_dashboard
        options = {"filters": [("state", "!=", "DEAD")], "detail": True, "limit": _LIMIT}
        actors = _listed(list_actors, **options) if has_dashboard else None
        has_dashboard = actors is not None
        try:
            waiting, held = _requests(job, actors or [])
        except ray.exceptions.RayError:  # the head is out of reach, or has died
            return
        now = time.monotonic()
        if not waiting:
            began = due = math.inf
        elif began == math.inf:
            began, due = now, now + patience
        if now >= due:
            due = now + _AGAIN
            print(_sentence(job, waiting, held, now - began), file=sys.stderr, flush=True)

    with repeated(look, every):
        yield


def _requests(job: str, actors: list[Any]) -> tuple[list[Mapping[str, float]], dict[str, Counter[str]]]:
    """Return the resources of each process of this job that waits for a place, and what each job holds."""
    waiting: list[Mapping[str, float]] = []
    held: dict[str, Counter[str]] = defaultdict(Counter)
    for group in ray.util.placement_group_table().values():
        owner = group["placement_group_id"][-len(job) :]  # Ray's identifiers end with their job's
        if group["state"] == "CREATED":
            held[owner].update(_sum(group["bundles"].values()))
        elif group["state"] != "REMOVED" and owner == job:
            waiting += group["bundles"].values()
    for actor in actors:
        if actor.placement_group_id is None and actor.node_id is not None:
            held[actor.job_id].update(actor.required_resources or {})
        elif actor.placement_group_id is None and actor.job_id == job:
            waiting.append(actor.required_resources or {"CPU": 1})  # only while it waits for a place
    return waiting, held


def _listed(what: Any, **options: Any) -> list[Any] | None:
    """Return what Ray's dashboard lists; None if the cluster has none."""
    try:
        return list(what(ray.get_runtime_context().gcs_address, raise_on_missing_output=False, **options))
    except Exception:  # no dashboard, or one that wants a token or is ending
        return None


def _sentence(job: str, waiting: list[Mapping[str, float]], held: Mapping[str, Counter[str]], seconds: float) -> str:
    jobs = _listed(list_jobs) or []
    names = {state.job_id: f"job {state.job_id} ({one_line(state.entrypoint):.60})" for state in jobs}
    names[job] = "this run"
    holders = [f"{names.get(owner, f'job {owner}')} holds {_amounts(sums)}" for owner, sums in held.items() if +sums]
    return (
        f"Ray has had no place for {len(waiting)} of this run's processes for {seconds:.0f} s: they need "
        f"{_amounts(_sum(waiting))}. The cluster has {_amounts(ray.cluster_resources())}, of which "
        f"{_amounts(ray.available_resources())} are free{''.join('; ' + holder for holder in holders)}. A process "
        "needs its GPU and CPU on one node. The run keeps waiting; end the jobs that hold them, or add nodes."
    )


def _sum(bundles: Iterable[Mapping[str, float]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)
    return total


def _amounts(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{resources.get(f'{name}', 0):g} {name}s" for name in ("GPU", "CPU"))
