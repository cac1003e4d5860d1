"""What is behind an error that Ray hands to whoever waited for a task, said so that a user can act on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar

import ray

from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped, UsageError
from openrlhf_gtpo.integration.controller.checkpoint_disk import free_bytes, gigabytes
from openrlhf_gtpo.megatron.checkpoint.folder import CheckpointWriteError

E = TypeVar("E", bound=BaseException)

# How torch 2.13's archive writer says that the disk is full: a RuntimeError of caffe2/serialize/inline_container.cc.
# Can go once it is an OSError (asked for in https://github.com/pytorch/pytorch/issues/76108).
_TORCH_WRITER = ("PytorchStreamWriter", "inline_container", "file write failed")


def cause_of(error: BaseException | None, kind: type[E]) -> E | None:
    """The innermost exception of ``kind`` behind a Ray task error.

    Ray 2.55 nests one task's error in another's and makes each an instance of its cause's class too, its text the
    whole remote traceback (``RayTaskError.as_instanceof_cause``); only the innermost says what it said when raised.
    Can go once the wrapping can be turned off: https://github.com/ray-project/ray/issues/48320.
    """
    found: E | None = None
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            found = error
        seen.add(id(error))
        error = getattr(error, "cause", None) or error.__cause__
    return found


@contextmanager
def explained(ckpt: SimpleNamespace) -> Iterator[None]:
    """Raise what ended a run on purpose, or what took it down, in the place of Ray's error.

    Args:
        ckpt: the run's ``--ckpt.*``.

    Raises:
        UsageError, StoppedOnRequest: as an actor raised it.
        TrainingStopped: as an actor raised it; a checkpoint could not be written; a process or a node died.
    """
    try:
        with write_errors(ckpt):  # the last checkpoint may come to its end after the last step
            yield
    except ray.exceptions.RayError as error:
        for kind in (UsageError, TrainingStopped, StoppedOnRequest):
            ended = cause_of(error, kind)
            if ended is not None:
                raise kind(str(ended)) from None
        raise_if_lost(error)
        raise


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
    raise TrainingStopped(
        f"{what}, and training cannot go on without it; the logs of its node say why. The same command with "
        f"--ckpt.load_enable goes on from the last checkpoint. Ray says: {_line(lost, 600)}"
    ) from None


@contextmanager
def write_errors(ckpt: SimpleNamespace, tag: str | None = None) -> Iterator[None]:
    """Turn the failure of an actor to write a checkpoint into a message that says what to do.

    Args:
        ckpt: the run's ``--ckpt.*``.
        tag: of the checkpoint that is being written; None where one from before may come to its end.

    Raises:
        TrainingStopped: it could not be written.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        reason = _write_failure(error, tag)
        if reason is None:
            raise
        free = free_bytes(ckpt.path)
        room = "" if free is None else f" The disk has {gigabytes(free)} free."
        try:
            last = (Path(ckpt.path) / "_actor" / "latest").read_text(encoding="utf-8").strip()
        except OSError:
            last = "the start, as there is no checkpoint before it"
        raise TrainingStopped(
            f"{reason}{room} Free some (or give --ckpt.path another disk, or keep fewer with --ckpt.max_num) and "
            f"start the same command with --ckpt.load_enable: it goes on from {last}."
        ) from error


def _write_failure(error: BaseException, tag: str | None) -> str | None:
    """One sentence; None where it was something else that failed."""
    known = cause_of(error, CheckpointWriteError)
    if known is not None:
        return str(known)
    if tag is None:
        return None
    failure = cause_of(error, OSError)
    if failure is not None:
        return f"The checkpoint {tag} could not be written: {_line(failure, 300)}."
    runtime = cause_of(error, RuntimeError)
    if any(words in str(runtime) for words in _TORCH_WRITER):
        return f"The checkpoint {tag} could not be written, as it happens on a full disk: {_line(runtime, 300)}."
    return None


def _line(error: BaseException | None, length: int) -> str:
    return " ".join(str(error).split())[:length]
