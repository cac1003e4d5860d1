"""The causes behind Ray's errors, reported so that a user can act on them."""

import _thread
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from openrlhf_gtpo.checkpoints.files import CheckpointError
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import Restartable, StoppedOnRequest, TrainingStopped, UsageError, last_error, one_line
from openrlhf_gtpo.platform.files import free_bytes, gigabytes, is_full
from openrlhf_gtpo.training.arguments import Ckpt

E = TypeVar("E", bound=BaseException)

_LOST = signal.SIGURG  # ignored unless handled


# Ray's errors for a dead process; the last if its memory monitor killed the process because the node ran out of
# memory.
DIED = (ray.exceptions.RayActorError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError)


def cause_of(error: BaseException | None, kind: type[E] | tuple[type[E], ...]) -> E | None:
    """Return the innermost exception of ``kind`` behind a Ray task error.

    Ray 2.55 nests one task's error in another's and makes each an instance of its cause's class too, with the whole
    remote traceback as its text (``RayTaskError.as_instanceof_cause``). Only the innermost keeps its original text.
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


LESS_MEMORY = (
    "If memory ran out, compute less at once: lower --train.max_tokens_per_gpu (Megatron, and "
    "--train.dynamic_batch_enable) or --train.micro_batch_size and --rollout.micro_batch_size."
)


@contextmanager
def explained() -> Iterator[None]:
    """Replace Ray's error by the reason why a run ended, on purpose or not.

    Raises:
        UsageError, StoppedOnRequest: an actor raised it.
        TrainingStopped: an actor raised it, or a checkpoint could not be loaded or written.
        Restartable: an actor raised it, or a process or a node died.
    """
    try:
        yield
    except ray.exceptions.RayError as error:
        failed = cause_of(error, (CheckpointError, CheckpointWriteError))
        if failed is not None:
            raise TrainingStopped(str(failed)) from None
        for kind in (UsageError, Restartable, TrainingStopped, StoppedOnRequest):
            ended = cause_of(error, kind)
            if ended is not None:
                raise kind(str(ended)) from None
        raise_if_lost(error)
        if (full := cause_of(error, torch.OutOfMemoryError)) is not None:
            raise TrainingStopped(f"A GPU is full: {one_line(full):.300} {LESS_MEMORY}") from error
        raise


@contextmanager
def deaths_noticed(ranks: Callable[[], list[Any]], every: float = 2.0) -> Iterator[None]:
    """Raise an error in the main thread when a rank dies, whatever the main thread is waiting for.

    While engines sample, nobody calls the ranks, and a death would only show once the rollout is over. Here each rank
    is asked for a sign of life, which it gives between two tasks; Ray answers for a dead rank. A signal that nobody
    else uses tells the main thread. SIGINT would not do, because background jobs of a shell ignore it.

    Args:
        ranks: returns the handles of the actors that exist so far.
        every: seconds between two checks.

    Raises:
        ActorDiedError, OutOfMemoryError: Ray's error for the dead rank.
    """
    lost: list[Exception] = []
    asked: dict[Any, Any] = {}  # ranks by the requests that they have not answered

    def look() -> None:
        if lost:
            return
        asked.update({rank.__ray_ready__.remote(): rank for rank in ranks() if rank not in asked.values()})
        ready, _ = ray.wait([*asked], num_returns=len(asked), timeout=0) if asked else ([], [])
        for answer in ready:
            del asked[answer]
            try:
                ray.get(answer)
            except (ray.exceptions.ActorDiedError, ray.exceptions.OutOfMemoryError) as error:
                lost.append(error)
                _thread.interrupt_main(_LOST)
                return
            except ray.exceptions.RayError:  # out of reach for a moment: ask again
                pass

    with raised_on(_LOST, lambda: lost[0]), repeated(look, every):
        yield


@contextmanager
def repeated(look: Callable[[], None], every: float) -> Iterator[None]:
    """Call ``look``, which asks Ray, every ``every`` seconds in its own thread, but never after the block."""
    over, looking = threading.Event(), threading.Lock()

    def look_on() -> None:
        while not over.wait(every):
            with looking:
                if over.is_set():
                    return
                look()

    threading.Thread(target=look_on, daemon=True).start()
    try:
        yield
    finally:
        over.set()
        with looking:  # a call after Ray's shutdown would start another Ray
            pass


@contextmanager
def raised_on(number: signal.Signals, error: Callable[[], BaseException]) -> Iterator[None]:
    """Raise ``error()`` in the main thread when it gets the signal ``number``, whatever it is waiting for.

    The handler itself can only raise KeyboardInterrupt: inside ``ray.get`` of Ray 2.55 (``check_signals`` in
    its ``_raylet``), SystemExit loses its status and anything else becomes a SystemError.
    """
    taken = False

    def interrupt(number: int, frame: Any) -> None:
        nonlocal taken
        taken = True
        raise KeyboardInterrupt

    before = signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        if taken:
            raise error() from None
        raise
    finally:
        signal.signal(number, before)


def answering(actors: list[Any]) -> Callable[[], bool]:
    """Return a function that is True once all ``actors`` have answered since it was last True."""
    asked: list[Any] = []

    def answered() -> bool:
        nonlocal asked
        if asked and len(ray.wait(asked, num_returns=len(asked), timeout=0)[0]) < len(asked):
            return False
        asked = [actor.__ray_ready__.remote() for actor in actors]
        return True

    return answered


def raise_if_lost(error: BaseException) -> None:
    """Raise Restartable, with the nodes that left the cluster, if a process or a node of the run died."""
    lost = cause_of(error, (*DIED, EngineDeadError))
    if lost is None:
        return
    try:
        dead = [f"{node['NodeName']} ({node['NodeManagerAddress']})" for node in ray.nodes() if not node["Alive"]]
    except Exception:  # the head may have died
        dead = []
    what = f"the node {', '.join(dead)} left the Ray cluster" if dead else "a process of the run died"
    why = f"see the logs of its node. Ray says: {last_error(lost, 600)}"
    if isinstance(lost, ray.exceptions.OutOfMemoryError) or "memory" in str(lost):
        why += f" {LESS_MEMORY}"
    raise Restartable(f"{what}, and training cannot continue without it; {why}") from None


@contextmanager
def write_errors(ckpt: Ckpt) -> Iterator[None]:
    """Replace Ray's error when an actor could not write a checkpoint; on a full disk, add the free space.

    Args:
        ckpt: the run's ``--ckpt.*``.

    Raises:
        CheckpointWriteError: the checkpoint could not be written.
    """
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        known = cause_of(error, CheckpointWriteError)
        if known is None:
            raise
        free = free_bytes(ckpt.path) if is_full(known) else None
        room = "" if free is None else f" The disk of --ckpt.path has {gigabytes(free)} free."
        raise CheckpointWriteError(f"{known}{room}") from error
