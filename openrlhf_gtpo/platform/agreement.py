"""Keeps all ranks in agreement: they fail together, and share the first rank's results."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def failure_of(action: Callable[[], None]) -> str | None:
    """Run ``action`` and return the message of the exception that it raised, or None."""
    try:
        action()
    except Exception as error:
        return message_of(error)
    return None


def message_of(error: Exception) -> str:
    """Return an error's text, preceded by its type if the text was not written for users."""
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"


def all_gather_objects(value: Any, group: torch.distributed.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``value``, in rank order."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(gathered, value, group=group)
    return gathered


def raise_together(failure: str | None, kind: type[Exception]) -> None:
    """If any rank has a ``failure``, raise ``kind`` on every rank with the first one."""
    failures = [text for text in all_gather_objects(failure) if text is not None]
    if failures:
        raise kind(failures[0])


def from_first_rank(function: Callable[[], T], kind: type[Exception]) -> T:
    """Return on every rank what ``function`` returns on the first; if it raises there, raise ``kind`` on all ranks."""
    answer: list[Any] = [None, None]
    if torch.distributed.get_rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:
            answer[1] = message_of(error)
    torch.distributed.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise kind(answer[1])
    return answer[0]
