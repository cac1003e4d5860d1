"""Every few batches, what FP8 does to the credit of a run: the old-policy forward once more in BF16, compared.

The controller decides (:class:`Fp8Audit`), the actors' forward obeys (:class:`Precision`). Where a gate is set and too many
advantages change their sign, that batch and those after it take the BF16 forward, until a later audit finds fewer.
"""

import dataclasses
import enum
from types import SimpleNamespace
from typing import Any, NamedTuple

import ray

from openrlhf_gtpo.integration.credit.entropy_credit import EntropyCredit
from openrlhf_gtpo.integration.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues


class AuditedForward(NamedTuple):
    """What the policy's forward returns in an audit: the pass as it is trained, and one without FP8."""

    as_trained: TokenValues
    exact: TokenValues


class Precision(enum.Enum):
    """Of the old-policy forward."""

    AS_TRAINED = "as trained"
    HIGH = "without FP8"
    BOTH = "both, for an audit"


class Fp8Audit:
    """The audits of one run.

    Args:
        args: with ``megatron.fp8_audit_steps`` (0 for none) and ``megatron.fp8_audit_gate`` (None for none).

    Attributes:
        in_high_precision: whether the gate has put the old-policy forward back to BF16.
    """

    def __init__(self, args: SimpleNamespace) -> None:
        on = args.actor.backend == "megatron" and args.megatron.fp8 is not None
        self._every = args.megatron.fp8_audit_steps if on else 0
        self._gate = args.megatron.fp8_audit_gate
        self._batches = 0
        self._asked = Precision.AS_TRAINED
        self.in_high_precision = False

    def before_batch(self, actors: Any) -> None:
        """Tell the actors how to compute the next batch; the first one is audited, and then every N-th."""
        if not self._every:
            return
        due = self._batches % self._every == 0
        self._batches += 1
        wanted = Precision.BOTH if due else Precision.HIGH if self.in_high_precision else Precision.AS_TRAINED
        if wanted is not self._asked:
            ray.get(actors.async_run_method(method_name="set_precision", precision=wanted.value))
            self._asked = wanted

    def compare(self, batch: RolloutBatch, exact: TokenValues, credit: EntropyCredit) -> dict[str, float]:
        """Metrics of an audited batch, both passes (B, T) in sampling order. Sets :attr:`in_high_precision`."""
        assert batch.entropy is not None
        rough = TokenValues(batch.log_probs, batch.entropy)
        budget = credit.error_budget(exact, rough, batch.mask, batch.outcome, batch.group_ids)
        self._pass_gate(budget.sign_flips)
        found = {names.FP8_PREFIX + name: value for name, value in dataclasses.asdict(budget).items()}
        return found | {names.FP8_IN_USE: float(not self.in_high_precision)}

    def _pass_gate(self, sign_flips: float) -> None:
        closed = self._gate is not None and sign_flips > self._gate
        if closed and not self.in_high_precision:
            print(
                f"FP8 changes the sign of {sign_flips:.2%} of the advantages, more than --megatron.fp8_audit_gate "
                f"{self._gate:g}: the old-policy forward falls back to BF16, from this batch on."
            )
        elif self.in_high_precision and not closed:
            print(
                f"FP8 changes the sign of {sign_flips:.2%} of the advantages: the old-policy forward is in FP8 again."
            )
        self.in_high_precision = closed
