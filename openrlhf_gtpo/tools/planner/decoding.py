"""Simulates vLLM's scheduler over a rollout, first come, first served: which rows decode when.

All rows arrive at the start and grow together, so a cache with room for their prompts may not hold their full length.
When it is full, the newest row is preempted: its cache is freed, and it waits, ahead of the others, until a row has
finished and there is room for all its tokens. They are then recomputed (vLLM V1). Samples of a prompt share its cache
(vLLM's prefix caching). ``tests/tools/planner/test_decoding.py`` checks this against vLLM's scheduler.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(frozen=True)
class Stretch:
    """Consecutive decode steps of the same rows.

    Fields:
        steps: tokens that each row gets.
        rows: number of decoding rows.
        context: tokens that attention reads per row, averaged over rows and steps.
        again: tokens to recompute for each row that resumes in this stretch; vLLM may still find some in its cache.
    """

    steps: int
    rows: int
    context: float
    again: tuple[float, ...]


def decode(
    lengths: Sequence[int], prompt: float, samples: int, cache_tokens: float, most_rows: int
) -> Iterator[Stretch]:
    """Return the stretches of a rollout in order.

    Args:
        lengths: tokens of each response, in the order of arrival.
        prompt: tokens of each prompt.
        samples: responses per prompt; they arrive one after another.
        cache_tokens: capacity of the KV cache; at least one row's tokens.
        most_rows: maximum rows that decode at once (vLLM's ``max_num_seqs``).
    """
    assert prompt + max(lengths) <= cache_tokens
    waiting = deque((row, length, 0) for row, length in enumerate(lengths))
    # In order of arrival: a row's first decode step, if it had never waited, and its last.
    running: dict[int, tuple[int, int]] = {}
    siblings: Counter[int] = Counter()  # running rows of each prompt
    ends: list[tuple[int, int]] = []
    clock, responses = 0, 0  # decode steps so far, and response tokens in the cache

    def room() -> float:
        return cache_tokens - responses - prompt * len(siblings)

    def leave(row: int, done: int) -> None:
        nonlocal responses
        del running[row]
        responses -= done
        siblings[row // samples] -= 1
        if not siblings[row // samples]:
            del siblings[row // samples]

    while waiting or running:
        # Admit waiting rows while the cache has room for their tokens and each running row's next one.
        again = []
        while waiting and len(running) < most_rows:
            row, length, done = waiting[0]
            needed = done + (0 if row // samples in siblings else prompt)
            if needed + 1 > room() - len(running):
                break
            waiting.popleft()
            running[row] = clock - done, clock - done + length
            heappush(ends, (clock - done + length, row))
            siblings[row // samples] += 1
            responses += done
            if done:
                again.append(needed)
        # Decode until a row finishes: before each stretch, preempt the newest rows if the cache is full.
        finished = False
        while not finished:
            while room() < len(running):
                row, (began, end) = next(reversed(running.items()))
                waiting.appendleft((row, end - began, clock - began))
                leave(row, clock - began)
            while running.get(ends[0][1], (0, 0))[1] != ends[0][0]:
                heappop(ends)  # the end of a preempted row
            rows = len(running)  # all decode until the next row ends or the cache is full
            steps = min(ends[0][0] - clock, int(room() / rows))
            yield Stretch(steps, rows, prompt + responses / rows + steps / 2, tuple(again))
            again = []
            clock += steps
            responses += steps * rows
            while ends and ends[0][0] == clock:
                _, row = heappop(ends)
                began, end = running.get(row, (0, 0))
                if end == clock:
                    leave(row, end - began)
                    finished = True
