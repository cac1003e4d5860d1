"""Simulates weights in flight on a virtual clock: how the rule for taking groups and the number of prompts in flight
change steps per hour, discarded tokens, and trained lengths.

    python3 -m benchmarks.studies.in_flight_clock --output docs/results/async/in_flight_clock.json     on one core

The stream is the product's (``training/controller/stream.py``). Engine, trainer and clock are simulated. An engine
takes ``base + each * active`` seconds per token for all active responses, and the trainer a fixed time per token.
Lengths are log-normal, by prompt and by response, with a tail longer than a step's training. Rules:

- ``dropping``, an earlier rule of this project: a step takes the first complete groups, a group with a token older
  than N steps is dropped and requested again, and prompts of 1 + N steps are in flight;
- ``first in, first out``: the product's with prompts of 1 + N steps in flight;
- ``complete first``: the product's, with prompts of 1 + (N + 1) // 2 steps.
"""

import argparse
import heapq
import itertools
import json
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.suite.results import write_results
from openrlhf_gtpo import platform

platform.choose()

from openrlhf_gtpo.training.controller import stream as module  # noqa: E402
from openrlhf_gtpo.training.controller.stream import Stream  # noqa: E402
from openrlhf_gtpo.training.rows import Request, Rollout  # noqa: E402

GROUP, BATCH = 8, 32


@dataclass(frozen=True)
class Host:
    """Timings of an engine and a trainer, in seconds."""

    train_token: float
    base: float = 12e-3  # per decoded token
    each: float = 4e-5  # extra per active response
    seats: int = 2048  # responses decoded at once
    transfer: float = 2.0
    prefill_token: float = 2e-5  # per token in flight, recomputed with new weights


HOSTS = {
    "rollout 2 x training": Host(5e-5),
    "rollout = training": Host(1.2e-4),
    "training 2 x rollout": Host(2.4e-4),
}


class Row:
    """The fields of a row that the stream and this file read."""

    def __init__(self, number: int, length: int) -> None:
        self.number, self.length = number, length
        self.began = self.oldest = 0  # the engine's clock in tokens per response, and its weights


class Clock:
    """A stream's sampler, its groups and their engine; ``seconds`` advances while the engine decodes."""

    def __init__(self, host: Host, prompts: int, median: int, filtered: float, seed: int) -> None:
        self.host, self._random = host, np.random.default_rng(seed)
        self.version = self.sampled = self.drawn = 0
        self.seconds = 0.0
        self.args = SimpleNamespace(algo=SimpleNamespace(dynamic_filtering_enable=filtered > 0))
        self.per_rollout, self.prompts = BATCH, prompts
        self._medians = median * np.exp(self._random.normal(0, 0.6, prompts))
        self._filtered = self._random.random(prompts) < filtered
        self._queue: deque[Row] = deque()
        self._active: list[tuple[int, int, Row]] = []  # a heap, ordered by the tokens at completion
        self._order = itertools.count()
        self._tokens = self.filtered = 0  # decoded per response; in groups that the filter has dropped
        self._groups: dict[int, tuple[Request, list[Row], int]] = {}

    # The sampler.

    def draw(self) -> Request | None:
        if self.drawn == self.prompts:
            return None
        self.drawn += 1
        return Request("", None, None, self.drawn - 1, GROUP)

    def training_params(self) -> None:
        return None

    def may_drop(self, prompts: int) -> int:
        return prompts

    def kept(self, rows: list[Row], seen: Rollout, may_drop: int, filters: bool) -> list[Row]:
        if not self._filtered[rows[0].number]:
            return rows
        self.filtered += sum(row.length for row in rows)
        return []

    def rollout(self, groups: dict[int, list[Row]], prompts: int, seen: Rollout) -> Rollout:
        seen.rows = [row for rows in groups.values() for row in rows]  # type: ignore[misc]
        return seen

    # The groups.

    def ask(self, request: Request) -> None:
        spread = np.exp(self._random.normal(0, 0.8, GROUP))
        lengths = np.clip(self._medians[request.number] * spread, 16, 16384).astype(int)
        rows = [Row(request.number, int(length)) for length in lengths]
        self._groups[request.number] = request, rows, GROUP
        self._queue.extend(rows)

    def in_flight(self) -> int:
        """Tokens that a transfer recomputes."""
        return sum(self._tokens - row.began for *_, row in self._active)

    def decode(self, until: float) -> list[tuple[Request, list[Row]]]:
        """Decode until a group is complete, or to ``until``; return the complete groups."""
        while True:
            while self._queue and len(self._active) < self.host.seats:
                row = self._queue.popleft()
                row.oldest, row.began = self.version, self._tokens
                heapq.heappush(self._active, (self._tokens + row.length, next(self._order), row))
            assert self._active or until < np.inf, "the step waits forever"
            a_token = self.host.base + self.host.each * len(self._active)
            tokens = self._active[0][0] - self._tokens if self._active else 0
            if not self._active or self.seconds + tokens * a_token > until:
                self._count(int((until - self.seconds) / a_token))
                self.seconds = until
                return []
            self.seconds += tokens * a_token
            self._count(tokens)
            done = []
            while self._active and self._active[0][0] == self._tokens:
                number = heapq.heappop(self._active)[2].number
                request, rows, missing = self._groups[number]
                self._groups[number] = request, rows, missing - 1
                if missing == 1:
                    del self._groups[number]
                    done.append((request, rows))
            if done:
                return done

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self.sampled += tokens * len(self._active)


class Dropping(Stream):
    """Takes the first complete groups, and requests again the ones that are too old by then."""

    dropped = 0

    def _chosen(self) -> list[Any] | None:
        for prompt in [*self._complete]:
            if self._engines.version - min(row.oldest for row in prompt.rows) > self._max_staleness:  # type: ignore
                self._complete.remove(prompt)
                prompt.rows = []
                self._ask(prompt)
                self.dropped += 1
        size = min(BATCH, len(self._prompts)) if self._drawing else BATCH
        return self._complete[:size] if len(self._complete) >= size else None


def simulate(
    rule: str, max_staleness: int, host: Host, seed: int, steps: int, filtered: float, median: int = 900
) -> dict[str, float]:
    """Simulate an episode of ``steps`` steps."""
    clock = Clock(host, int(steps * BATCH / (1 - filtered)), median, filtered, seed)
    engines = mock.MagicMock(version=0)  # only the clock uses them
    stream = (Dropping if rule == "dropping" else Stream)(clock, None, engines, lambda steps: True, max_staleness)
    if rule != "complete first":
        stream._ahead = max_staleness
    with mock.patch.object(module, "Groups", lambda *given: clock):
        stream.begin(0, 1)
    ages: list[int] = []
    lengths: list[list[int]] = []
    waited = 0.0

    def collect(groups: list[tuple[Request, list[Row]]]) -> None:
        for group in groups:
            stream._take_up(*group)  # type: ignore[arg-type]

    exhausted = False
    while not exhausted:
        stream._draw_ahead()
        before = clock.seconds
        while stream._chosen() is None:
            collect(clock.decode(np.inf))
        waited += clock.seconds - before
        rollout = stream._take()
        exhausted = rollout.exhausted
        if not rollout.rows:
            continue
        rows: Any = rollout.rows
        ages += [clock.version - row.oldest for row in rows]
        lengths.append([row.length for row in rows])
        ends = clock.seconds + host.train_token * sum(lengths[-1])
        while clock.seconds < ends:
            collect(clock.decode(ends))
        clock.seconds += host.transfer + host.prefill_token * clock.in_flight()
        clock.version = engines.version = clock.version + 1
    assert max(ages) <= max_staleness, "a token is too old"
    means, trained = [statistics.fmean(step) for step in lengths], sum(map(sum, lengths))
    third = max(1, len(means) // 3)
    return {
        "steps_per_hour": 3600 * len(lengths) / clock.seconds,
        "tokens_per_second": trained / clock.seconds,
        "thrown_away": 1 - (trained + clock.filtered) / clock.sampled,
        "age": statistics.fmean(ages),
        "oldest": max(ages),
        "trainer_waits": waited / clock.seconds,
        "length": trained / sum(map(len, lengths)),
        "length_first_third": statistics.fmean(means[:third]),
        "length_last_third": statistics.fmean(means[-third:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    rules = ("dropping", "first in, first out", "complete first")
    cases = [(0, "complete first"), *((n, rule) for n in (1, 2, 3, 4) for rule in rules)]
    found = []
    for title, host in HOSTS.items():
        for filtered in (0.0, 0.3) if title == "rollout = training" else (0.0,):
            for staleness, rule in cases:
                runs = [simulate(rule, staleness, host, seed, args.steps, filtered) for seed in range(args.seeds)]
                spread = {name: _spread([run[name] for run in runs]) for name in runs[0]}
                found.append({"host": title, "filtered": filtered, "max_staleness": staleness, "rule": rule} | spread)
                print(json.dumps(found[-1]), flush=True)
    write_results(args.output, args, {"hosts": {name: asdict(host) for name, host in HOSTS.items()}, "runs": found})


def _spread(values: list[float]) -> dict[str, float]:
    return {name: round(of(values), 4) for name, of in (("mean", statistics.fmean), ("min", min), ("max", max))}


if __name__ == "__main__":
    main()
