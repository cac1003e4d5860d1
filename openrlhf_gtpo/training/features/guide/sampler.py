"""A sampler in which the guide answers a part of each group, and prompts at which the policy always fails."""

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
_OF_GUIDE = 1 << 31  # in the guide's seeds, where the policy's have a response's place


class GuidedSampler(Sampler):
    """The plain sampler, whose groups have rows of the ``guide``.

    Attributes:
        guide: whose share of the rows follows its ``step``.
        queue: prompts that wait for the guide, with ``--algo.guide.rescue_batch``.
    """

    def __init__(self, *args: Any, guide: Guide) -> None:
        super().__init__(*args)
        self.guide = guide
        self.queue = RescueQueue(guide.rescue_batch)
        self._failures: dict[int, list[Row]] = {}  # of the policy, by the prompts of the rollout
        self.with_log_probs = True  # either all rows carry their engine's log-probs, or none do

    def sample(self) -> Rollout:
        """As the plain sampler's; rows of rescued groups are the rollout's ``others``."""
        with self.guide.awake() if self.guide.share > 0 else nullcontext():
            self._failures.clear()
            rollout = super().sample()
            for number in sorted(self._failures):  # whatever came back first
                self.queue.add(self._failures[number])
            if self.guide.rescue_batch and rollout.rows:
                self._rescue(rollout)
        for row in rollout.rows:
            self._mark(row, row.off_policy)
        return rollout

    def shares(self, request: Request) -> Sequence[Request]:
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
        self.guide.died(described(getattr(error, "cause", None) or error))  # for a task's error, what the task raised
        return request._replace(seed=request.seed and request.seed[:-1], engine=None)

    def on_filtered(self, rows: Sequence[Row]) -> None:
        if self.guide.rescue_batch and not any(self.guide.is_success(row) for row in rows):
            self._failures[rows[0].number] = [row for row in rows if not row.off_policy]

    def _rescue(self, rollout: Rollout) -> None:
        """Have the guide answer prompts at which the policy failed, if a batch of them is waiting; those that it
        answers correctly become groups with rows of both.

        The ratios of these rows use the log-probs of the engine they came from: the policy may have moved since.
        """
        guide, args = self.guide, self.args
        failures = self.queue.take()
        if not failures:
            return
        samples = args.rollout.n_samples_per_prompt
        # Half of a group; more if some rows that failed were the guide's, so that fewer are the policy's.
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
                row.label = None  # or it would pass for the row's number in a dump (see ``dumps/ratios.py``)
            rollout.others += rows

    def _mark(self, row: Row, is_guides: bool, is_rescued: bool = False) -> None:
        """Say whose the row is. One whose ratio uses its engine's log-probs is not of the current policy: if entropies
        come from the sampler, it has none.

        Raises:
            TrainingStopped: its engine's log-probs, to which the ratio is, are missing.
        """
        row.off_policy = is_guides or is_rescued
        if row.log_probs is None or row.off_policy and not np.isfinite(row.log_probs[row.mask]).all():
            raise TrainingStopped(
                "With a guide, expected a finite log-prob from the engine for every token it samples, got a response "
                f"with {'none' if row.log_probs is None else 'others'}; an agent of --train.agent_func_path has to "
                f"hand on the engine's as rollout_log_probs. Prompt: {row.prompt!r:.300}"
            )
        row.metrics |= {names.GUIDE_ROWS: float(is_guides), names.OFF_POLICY_ROWS: float(row.off_policy)}
        if self.args.algo.guide.rescue_batch:
            row.metrics[names.RESCUE_ROWS] = float(is_rescued)
        if row.off_policy:
            row.values = None
