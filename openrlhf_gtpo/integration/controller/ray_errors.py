"""What is behind an error that Ray hands to whoever waited for a task."""

from typing import TypeVar

import ray

from openrlhf_gtpo.errors import TrainingStopped

E = TypeVar("E", bound=BaseException)


def cause_of(error: BaseException | None, kind: type[E]) -> E | None:
    """The innermost exception of ``kind`` behind a Ray task error.

    Ray nests one task's error in another's, and makes each an instance of its cause's class too, with the whole remote
    traceback as its text; only the innermost one says what it said when it was raised.
    """
    found: E | None = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            found = error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return found


def raise_if_lost(error: BaseException) -> None:
    """Where a process or a node of the run died, say which nodes are left.

    Raises:
        TrainingStopped: one did.
    """
    lost = cause_of(error, ray.exceptions.RayActorError) or cause_of(error, ray.exceptions.NodeDiedError)
    if lost is None:
        return
    try:
        dead = [f"{node['NodeName']} ({node['NodeManagerAddress']})" for node in ray.nodes() if not node["Alive"]]
    except Exception:  # the head may be what died
        dead = []
    what = f"the node {', '.join(dead)} left the Ray cluster" if dead else "a process of the run died"
    reason = " ".join(str(lost).split())
    raise TrainingStopped(
        f"{what}, and training cannot go on without it; the logs of its node say why. The same command with "
        f"--ckpt.load_enable goes on from the last checkpoint. Ray says: {reason[:600]}"
    ) from None
