"""A sampler with a guide, which samples part of each group and answers prompts that the policy always fails."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import ray

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.features.guide.guide import DEATHS, Guide
from openrlhf_gtpo.training.features.guide.rescue import RescueQueue
from openrlhf_gtpo.training.rollout.rewards import described
from openrlhf_gtpo.training.rollout.sampler import Sampler
from openrlhf_gtpo.training.rows import Dropped, Request, Rollout, Row

_RESCUE = 2  # stream of seeds, after the policy's and an evaluation's
_OF_GUIDE = 1 << 31  # in the guide's seeds; the policy's seeds have a response's place there


class GuidedSampler(Sampler):
    """A sampler whose groups have rows of the ``guide``.

    Attributes:
        guide: the guide, whose fraction of the rows depends on its ``step``.
        queue: prompts that wait for the guide, with ``--algo.guide.rescue_batch``.
    """

    def __init__(self, *args: Any, guide: Guide) -> None:
        super().__init__(*args)
        self.guide = guide
        self.queue = RescueQueue(guide.rescue_batch)
        self._failures: dict[int, list[Row]] = {}  # of the policy, by the prompts of the rollout
        self.with_log_probs = True  # either all rows carry their engine's log-probs, or none do

    def sample(self) -> Rollout:
        """Sample a rollout; rows of rescued groups are its ``others``."""
        with self.guide.awake() if self.guide.fraction > 0 else nullcontext():
            self._failures.clear()
            rollout = super().sample()
            for number in sorted(self._failures):  # in drawing order
                self.queue.add(self._failures[number])
            if self.guide.rescue_batch and rollout.rows:
                self._rescue(rollout)
        for row in rollout.rows:
            self._mark(row, row.off_policy)
        return rollout

    def split(self, request: Request) -> Sequence[Request]:
        part = self.guide.rows_of(request.number)
        if part is None:
            return [request]
        engine, count = part
        own = request.samples - count
        seed = request.seed and (*request.seed, _OF_GUIDE)
        return [request._replace(samples=own), request._replace(samples=count, first=own, seed=seed, engine=engine)]

    def in_place_of(self, request: Request, error: Exception) -> Request:
        if request.engine not in self.guide.engines:
            return super().in_place_of(request, error)
        if not isinstance(error, DEATHS):
            raise error
        self.guide.died(described(getattr(error, "cause", None) or error))  # Ray's error for a task has a cause
        return request._replace(seed=request.seed and request.seed[:-1], engine=None)

    def on_filtered(self, rows: Sequence[Row]) -> None:
        if self.guide.rescue_batch and not any(self.guide.is_success(row) for row in rows):
            self._failures[rows[0].number] = [row for row in rows if not row.off_policy]

    def _rescue(self, rollout: Rollout) -> None:
        """Let the guide answer prompts that the policy failed, if a batch of them is waiting. If it succeeds, guide
        and policy rows form a group.

        The ratios of these rows use the log-probs of their own engines, because the policy may have changed since.
        """
        guide, args = self.guide, self.args
        failures = self.queue.take()
        if not failures:
            return
        samples = args.rollout.n_samples_per_prompt
        # Ask for half of each group; more if the guide had some of the failed rows, so that the policy has fewer.
        count = max(samples // 2, samples - min(map(len, failures)))
        requests = []
        for place, (first, *_) in enumerate(failures):
            seed = (args.train.seed, _RESCUE, first.number) if args.train.full_determinism_enable else None
            engine = guide.engines[place % len(guide.engines)]
            variables = self.variables_of(first.prompt)
            requests.append(
                Request(
                    first.prompt, first.label, None, first.number, count, seed=seed, engine=engine, variables=variables
                )
            )
        with guide.awake():  # around all of this, so that its living engines sleep again if one dies
            try:
                params = self.params(args.rollout.temperature, args.rollout.top_p, True)
                answers = ray.get(list(self.ask(requests, params)))
            except DEATHS as death:
                guide.died(f"{type(death).__name__} at a rescue")
                self.queue.given_up += len(failures)
                return
        # Groups of both for the prompts that the guide answered correctly.
        for own, theirs in zip(failures, answers, strict=True):
            rows = [] if isinstance(theirs, Dropped) else [*own[: samples - count], *theirs]
            if rows:
                rollout.tokens += sum(row.num_actions for row in theirs)
            if not any(guide.is_success(row) for row in rows):
                self.queue.given_up += 1
                continue
            self.queue.rescued += 1
            for place, row in enumerate(rows):
                self._mark(row, place >= samples - count, is_rescued=True)
                row.weight = args.algo.guide.rescue_weight
                row.label = None  # a dump would read it as the row's number (see ``dumps/ratios.py``)
            rollout.others += rows

    def _mark(self, row: Row, is_guides: bool, is_rescued: bool = False) -> None:
        """Mark whose row it is. An off-policy row, whose ratio uses its engine's log-probs, loses the sampler's
        values.

        Raises:
            TrainingStopped: its engine's log-probs are missing.
        """
        row.off_policy = is_guides or is_rescued
        if row.log_probs is None or row.off_policy and not np.isfinite(row.log_probs[row.mask]).all():
            raise TrainingStopped(
                "With a guide, expected a finite log-prob from the engine for every sampled token, got a response "
                f"with {'none' if row.log_probs is None else 'others'}; an agent of --train.agent_func_path has to "
                f"return the engine's log-probs as rollout_log_probs. Prompt: {row.prompt!r:.300}"
            )
        row.metrics |= {names.GUIDE_ROWS: float(is_guides), names.OFF_POLICY_ROWS: float(row.off_policy)}
        if self.args.algo.guide.rescue_batch:
            row.metrics[names.RESCUE_ROWS] = float(is_rescued)
        if row.off_policy:
            row.values = None
