"""Audits: every few batches, how an approximate source of the old policy's values changes a run's credit.

If the difference exceeds the gate, this batch and the following ones use exact values until a later audit finds a
difference within the gate.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit, entropy_credit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature

_AUDIT = "audit"  # in a checkpoint


class Source(NamedTuple):
    """The audited source, with its words in messages and its names in metrics."""

    gated: str  # the field of ErrorBudget that the gate bounds
    found: str  # the gated value in words, as the beginning of a sentence
    gate: str  # the flag that sets the gate
    closes: str  # what happens when the gate closes, as the end of a sentence
    opens: str  # likewise, when it opens
    metrics: Mapping[str, str]  # names of metrics by field of ErrorBudget
    in_use: str  # metric that is 1 while the approximate values are in use, else 0


class Audit:
    """The audits of one source in one run.

    Args:
        source: the audited source.
        every: audit the first batch and then every N-th; 0 never audits.
        gate: maximum difference at which the source is used; None for no gate.

    Attributes:
        batches: number of batches in the run so far.
        closed: whether exact values replace the approximate ones now.
    """

    def __init__(self, source: Source, every: int, gate: float | None) -> None:
        self._source, self._every, self._gate = source, every, gate
        self.batches = 0
        self.closed = False

    def due(self) -> bool:
        """Count the next batch; True if it is to be audited."""
        if not self._every:
            self.closed = False  # may be True from the checkpoint of a run with audits
            return False
        self.batches += 1
        return (self.batches - 1) % self._every == 0

    def due_in(self, batches: int) -> bool:
        """True if the batch after so many ``batches`` is to be audited."""
        return bool(self._every) and (self.batches + batches) % self._every == 0

    def compare(
        self, batch: RolloutBatch, exact: TokenValues, mask: Tensor, credit: EntropyCredit
    ) -> dict[str, float]:
        """Compare an audited batch with ``exact`` values, (B, T) in sampling order, at the tokens of ``mask``; set
        :attr:`closed` and return metrics."""
        assert batch.values is not None
        source = self._source
        budget = credit.error_budget(exact, batch.values, mask, batch.outcome, batch.group_ids)
        values = dataclasses.asdict(budget)
        closed = self._gate is not None and values[source.gated] > self._gate
        text = source.found.format(values[source.gated])
        if closed and not self.closed:
            print(f"{text}, more than {source.gate} {self._gate:g}: {source.closes}, from this batch on.", flush=True)
        elif self.closed and not closed:
            print(f"{text}: {source.opens}.", flush=True)
        self.closed = closed
        return {metric: values[name] for name, metric in source.metrics.items()} | {source.in_use: float(not closed)}

    def state(self) -> tuple[int, bool]:
        return self.batches, self.closed

    def restore(self, state: Any) -> None:
        self.batches, self.closed = state


class AuditedFeature(ControllerFeature):
    """A feature in the controller with an approximate source of values, and its audits.

    Args:
        source, every, gate: as for :class:`Audit`; without entropy credit there is nothing to audit.
    """

    def __init__(self, args: Arguments, source: Source, every: int, gate: float | None) -> None:
        super().__init__(args)
        self.credit = entropy_credit(args)
        self.audit = Audit(source, 0 if self.credit is None else every, gate)
        self._exact: list[TokenValues] | None = None  # of an audited batch, by micro-batch
        self._metrics: dict[str, float] = {}

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        metrics |= self._metrics

    def state(self) -> dict[str, Any]:
        return {_AUDIT: self.audit.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.audit.restore(state.get(_AUDIT, (0, False)))
