"""Every few batches, what a rougher source of the old policy's values does to the credit of a run: FP8's forward
compared with BF16's, or vLLM's sampler with the actor's forward.

Where a gate is set and the difference is larger, that batch and those after it take the exact values, until a later
audit finds a smaller one. FP8's gate is on the advantages that change sign. The sampler's is on entropies: an engine
that missed an update is off by as many nats whatever weight the credit gives them, and signs may all stay.
"""

import dataclasses
from collections.abc import Callable, Mapping
from copy import copy
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from openrlhf_gtpo.algorithms import ErrorBudget
from openrlhf_gtpo.integration.credit.entropy_credit import EntropyCredit, entropy_credit
from openrlhf_gtpo.integration.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues


class _Rough(NamedTuple):
    """What is audited, as its messages and metrics name it.

    Attributes:
        gated: the field of ``ErrorBudget`` that the gate is on.
        found: it in words, to begin a sentence.
        gate: the flag.
        closes, opens: what happens at the gate, to end a sentence.
        metrics: fields of ``ErrorBudget`` to their metrics.
        in_use: metric that is 1 while the rough values are in use, else 0.
    """

    gated: str
    found: str
    gate: str
    closes: str
    opens: str
    metrics: Mapping[str, str]
    in_use: str


_FP8 = _Rough(
    "sign_flips",
    "FP8 changes the sign of {:.2%} of the advantages",
    "--megatron.fp8_audit_gate",
    "the old-policy forward falls back to BF16",
    "the old-policy forward is in FP8 again",
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
    """The audits of one run, of at most one source.

    Args:
        args: with ``rollout.entropy_audit_*``, or ``megatron.fp8_audit_*`` with entropies from an actor in FP8: how
            often (0 for never) and the gate (None for none).

    Attributes:
        batches: of the run so far.
        closed: whether the gate has put the exact values in the place of the rough ones.
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
        self._actors_in_high_precision = False

    def due(self) -> bool:
        """Whether the next batch is audited: the first is, and then every N-th."""
        if not self._every:
            self.closed = False  # of a run with audits that this one goes on from
            return False
        self.batches += 1
        return (self.batches - 1) % self._every == 0

    def suspended(self) -> "Audit":
        """An audit for batches that are no part of the audited ones."""
        other = copy(self)
        other._every = 0
        return other

    def without_fp8(
        self, due: bool, actors: Any, forward: Callable[[], list[TokenValues]]
    ) -> list[TokenValues] | None:
        """Tell actors in FP8 how to compute a batch; what ``forward`` gives without it for an audited one."""
        if self._rough is not _FP8 or not self._every:
            return None
        exact = None
        if due:
            self._set_high_precision(actors, True)
            exact = forward()
        self._set_high_precision(actors, self.closed and not due)
        return exact

    def _set_high_precision(self, actors: Any, on: bool) -> None:
        if on is not self._actors_in_high_precision:
            ray.get(actors.async_run_method(method_name="set_high_precision", on=on))
            self._actors_in_high_precision = on

    def compare(self, batch: RolloutBatch, exact: TokenValues, credit: EntropyCredit) -> dict[str, float]:
        """Metrics of an audited batch, ``exact`` (B, T) in sampling order as its values. Sets :attr:`closed`."""
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
