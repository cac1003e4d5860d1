"""How many tokens rows cost if each prompt is computed once, and how to cut rows into even runs."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor


class Prompt(NamedTuple):
    """The tokens before a row's first action, which rows with the same ones can share."""

    tokens: bytes
    length: int

    @classmethod
    def of(cls, ids: Tensor, actions: Tensor) -> "Prompt":
        """Make the prompt of a row from its (n,) ids and (n,) bool actions."""
        length = int(actions.int().argmax()) if actions.any() else len(ids)
        return cls(ids[:length].numpy().tobytes(), length)


def computed_tokens(
    lengths: Sequence[int], prompts: Sequence[Prompt] | None, rows: Iterable[int] | None = None
) -> int:
    """Count the tokens of rows of ``lengths`` in one micro-batch that computes each of their ``prompts`` once.

    Args:
        rows: the rows in the micro-batch; None for all.
    """
    members = range(len(lengths)) if rows is None else list(rows)
    if prompts is None:
        return sum(lengths[row] for row in members)
    own = sum(lengths[row] - prompts[row].length for row in members)
    return own + sum(prompt.length for prompt in {prompts[row] for row in members})


def cut_evenly(lengths: Sequence[int], prompts: Sequence[Prompt], max_tokens: int, multiple: int) -> list[range]:
    """Cut rows into runs of at most ``max_tokens`` computed tokens each, or of one row, about equal in tokens.

    Args:
        multiple: the number of runs is a multiple of this, unless each row is a run.
    """

    def cut(limit: int) -> list[range]:
        runs, begin, tokens = [], 0, 0
        for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
            known = row > begin and prompt == prompts[row - 1]
            more = length - prompt.length if known else length
            if row > begin and tokens + more > limit:
                runs.append(range(begin, row))
                begin, tokens, more = row, 0, length
            tokens += more
        return [*runs, range(begin, len(lengths))]

    def tokens_of(run: range) -> int:
        return computed_tokens(lengths, prompts, run)

    wanted = -(-len(cut(max_tokens)) // multiple) * multiple
    low, high = 0, max_tokens  # find the smallest limit that gives no more runs than wanted
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= wanted else (middle + 1, high)
    runs = cut(low)
    while len(runs) % multiple and len(runs) < len(lengths):  # halve the largest run
        place = max((i for i, run in enumerate(runs) if len(run) > 1), key=lambda i: tokens_of(runs[i]))
        begin, end = runs[place].start, runs[place].stop
        runs[place : place + 1] = range(begin, (begin + end) // 2), range((begin + end) // 2, end)
    return runs
