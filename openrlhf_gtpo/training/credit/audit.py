"""Measures, every few batches, how a rougher source of the old policy's values affects the credit of a run: FP8's
forward compared with BF16's, or vLLM's sampler compared with the actor's forward.

If a gate is set and the difference exceeds it, that batch and those after it use the exact values until a later audit
finds a difference within the gate. With FP8 these are the entropies alone, from a forward of their own: training is in
FP8 too, and a ratio of its log-probs to BF16's would have FP8's error in it.

FP8's gate is on the advantages that change sign. The sampler's is on entropies: an engine that missed an update is off
by the same number of nats whatever weight the credit gives them, even if no sign changes.
"""

import dataclasses
from collections.abc import Callable, Mapping
from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from openrlhf_gtpo.algorithms import ErrorBudget
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit, entropy_credit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch


class _Rough(NamedTuple):
    """The source that is audited, and how messages and metrics name it."""

    gated: str  # the field of ErrorBudget that the gate is on
    found: str  # the gated value in words, to begin a sentence
    gate: str  # the flag that sets the gate
    closes: str  # what happens when the gate closes, to end a sentence
    opens: str  # likewise, when it opens
    metrics: Mapping[str, str]  # fields of ErrorBudget, each with the name of its metric
    in_use: str  # metric that is 1 while the rough values are in use, else 0


_FP8 = _Rough(
    "sign_flips",
    "FP8 changes the sign of {:.2%} of the advantages",
    "--megatron.fp8_audit_gate",
    "entropies fall back to BF16",
    "entropies are FP8's again",
    {field.name: names.FP8_PREFIX + field.name for field in dataclasses.fields(ErrorBudget)},
    names.FP8_IN_USE,
)
_SAMPLER = _Rough(
    "entropy_error_mean",
    "The sampler's entropies are off by {:.3f} nats on average",
    "--rollout.entropy_audit_gate",
    "entropies fall back to the actor's",
    "entropies are the sampler's again",
    names.SAMPLER_AUDIT,
    names.SAMPLER_IN_USE,
)


class Audit:
    """The audits of one run, which cover at most one source.

    Args:
        args: how often to audit (0 for never) and the gate (None for none), from ``rollout.entropy_audit_*``, or from
            ``megatron.fp8_audit_*`` if entropies come from an actor in FP8.

    Attributes:
        batches: number of batches in the run so far.
        closed: whether the gate has replaced the rough values with the exact ones.
    """

    def __init__(self, args: SimpleNamespace) -> None:
        self._rough, self._every = _FP8, 0
        self._gate = args.megatron.fp8_audit_gate
        if args.rollout.entropy == "sampler":
            self._rough, self._gate = _SAMPLER, args.rollout.entropy_audit_gate
            self._every = 0 if entropy_credit(args) is None else args.rollout.entropy_audit_steps
        elif args.actor.backend == "megatron" and args.megatron.fp8 is not None:
            self._every = args.megatron.fp8_audit_steps
        self.batches = 0
        self.closed = False
        self._suspended = False

    def due(self) -> bool:
        """True if the next batch is to be audited: the first one is, and then every N-th."""
        if not self._every:
            self.closed = False  # may be True from the checkpoint of a run with audits
        if not self._every or self._suspended:
            return False
        self.batches += 1
        return (self.batches - 1) % self._every == 0

    def suspended(self) -> "Audit":
        """A copy that audits nothing, for batches that do not belong to the audited ones."""
        other = copy(self)
        other._suspended = True
        return other

    def without_fp8(
        self, due: bool, actors: Any, forward: Callable[[], list[TokenValues]]
    ) -> list[TokenValues] | None:
        """What ``forward`` gives without FP8, if ``actors`` use it and the batch is audited or the gate is closed."""
        if self._rough is not _FP8 or not (due or self.closed):
            return None
        ray.get(actors.async_run_method(method_name="set_high_precision", on=True))
        exact = forward()
        ray.get(actors.async_run_method(method_name="set_high_precision", on=False))
        return exact

    def in_use(self, rough: TokenValues, exact: TokenValues) -> TokenValues:
        """The values that a closed gate leaves to credit and ratio."""
        return TokenValues(rough.log_probs, exact.entropy) if self._rough is _FP8 else exact

    def compare(self, batch: RolloutBatch, exact: TokenValues, credit: EntropyCredit) -> dict[str, float]:
        """Metrics of an audited batch against ``exact`` values, (B, T) in sampling order. Sets :attr:`closed`."""
        assert batch.values is not None
        rough = self._rough
        mask = batch.mask
        if rough is _SAMPLER and batch.guided is not None:  # rows that the policy's sampler has not seen
            mask = mask & ~batch.guided.unsqueeze(-1)
        budget = credit.error_budget(exact, batch.values, mask, batch.outcome, batch.group_ids)
        values = dataclasses.asdict(budget)
        closed = self._gate is not None and values[rough.gated] > self._gate
        found = rough.found.format(values[rough.gated])
        if closed and not self.closed:
            print(f"{found}, more than {rough.gate} {self._gate:g}: {rough.closes}, from this batch on.", flush=True)
        elif self.closed and not closed:
            print(f"{found}: {rough.opens}.", flush=True)
        self.closed = closed
        return {metric: values[name] for name, metric in rough.metrics.items()} | {rough.in_use: float(not closed)}
