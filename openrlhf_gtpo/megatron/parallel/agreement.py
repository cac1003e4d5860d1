"""What all ranks must do alike: fail together, and go on from what the first rank found."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def failure_of(action: Callable[[], None]) -> str | None:
    """Run ``action``; the message of what it raised, or None."""
    try:
        action()
    except Exception as error:
        return message_of(error)
    return None


def message_of(error: Exception) -> str:
    """An error's text, which begins with its kind where the text was not made for users."""
    return str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"


def raise_together(failure: str | None, kind: type[Exception]) -> None:
    """Raise ``kind`` on every rank with the first rank's ``failure`` that is one; nothing where all are None."""
    failures: list[str | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(failures, failure)
    found = [text for text in failures if text is not None]
    if found:
        raise kind(found[0])


def from_first_rank(function: Callable[[], T], kind: type[Exception]) -> T:
    """What ``function`` returns on the first rank, on every rank; ``kind`` on all of them where it raises."""
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
