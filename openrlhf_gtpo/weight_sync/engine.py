"""What a weight transfer asks of an engine: to call a method on all of its workers, and to tell when they have answered.

Anything that does so is an engine: an actor of Ray's around vLLM, or a process with a plain model.
"""

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol


class Engine(Protocol):
    """Call ``method`` of :class:`~openrlhf_gtpo.weight_sync.receiver.WeightReceiver` on every worker."""

    def __call__(self, method: str, *args: Any) -> "Future[list[Any]]":
        """The workers' results, in their order, or what the first of them to fail has raised."""


def ray_engine(actor: Any) -> Engine:
    """The engine behind the handle of a rollout actor, whose methods carry the names of the receiver's."""

    def call(method: str, *args: Any) -> "Future[list[Any]]":
        return getattr(actor, method).remote(*args).future()

    return call


def results(calls: Sequence["Future[list[Any]]"]) -> list[list[Any]]:
    """Every engine's answer; what the first engine to fail has raised, without waiting for the others."""
    wait(calls, return_when=FIRST_EXCEPTION)
    raise_failure(calls)
    return [call.result() for call in calls]


def raise_failure(calls: Sequence["Future[list[Any]]"]) -> None:
    """Raise what an engine has raised so far, if any has."""
    for call in calls:
        if call.done():
            call.result()
