"""Measures, every few batches, how a rougher source of the old policy's values affects the credit of a run.

If a gate is set and the difference exceeds it, that batch and those after it use the exact values until a later audit
finds a difference within the gate.
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
    """What is audited, and how messages and metrics name it."""

    gated: str  # the field of ErrorBudget that the gate is on
    found: str  # the gated value in words, to begin a sentence
    gate: str  # the flag that sets the gate
    closes: str  # what happens when the gate closes, to end a sentence
    opens: str  # likewise, when it opens
    metrics: Mapping[str, str]  # fields of ErrorBudget, each with the name of its metric
    in_use: str  # metric that is 1 while the rough values are in use, else 0


class Audit:
    """The audits of one source in one run.

    Args:
        source: what is audited.
        every: audit the first batch and then every N-th; 0 never.
        gate: the largest difference at which the source is used; None for no gate.

    Attributes:
        batches: number of batches in the run so far.
        closed: whether the gate has replaced the rough values with the exact ones.
    """

    def __init__(self, source: Source, every: int, gate: float | None) -> None:
        self._source, self._every, self._gate = source, every, gate
        self.batches = 0
        self.closed = False

    def due(self) -> bool:
        """True if the next batch is to be audited."""
        if not self._every:
            self.closed = False  # may be True from the checkpoint of a run with audits
            return False
        self.batches += 1
        return (self.batches - 1) % self._every == 0

    def due_in(self, batches: int) -> bool:
        """True if the batch after so many others is to be audited."""
        return bool(self._every) and (self.batches + batches) % self._every == 0

    def compare(
        self, batch: RolloutBatch, exact: TokenValues, mask: Tensor, credit: EntropyCredit
    ) -> dict[str, float]:
        """Metrics of an audited batch against ``exact`` values, (B, T) in sampling order, at the tokens of ``mask``.
        Sets :attr:`closed`."""
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
    """A feature in the controller that brings a rougher source of values, and audits it.

    Args:
        source, every, gate: as for :class:`Audit`; without entropy credit there is nothing to audit.
    """

    def __init__(self, args: Arguments, source: Source, every: int, gate: float | None) -> None:
        super().__init__(args)
        self.credit = entropy_credit(args)
        self.audit = Audit(source, 0 if self.credit is None else every, gate)
        self._exact: list[TokenValues] | None = None  # of the micro-batches of a batch that is audited
        self._metrics: dict[str, float] = {}

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        metrics |= self._metrics

    def state(self) -> dict[str, Any]:
        return {_AUDIT: self.audit.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.audit.restore(state.get(_AUDIT, (0, False)))
