"""Every few batches, what FP8 does to the credit of a run: the old-policy forward once more in BF16, compared.

Where a gate is set and too many advantages change sign, that batch and those after it take the BF16 forward, until
a later audit finds fewer.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray

from openrlhf_gtpo.integration.credit.entropy_credit import EntropyCredit
from openrlhf_gtpo.integration.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues


class Fp8Audit:
    """The audits of one run.

    Args:
        args: with ``megatron.fp8_audit_steps`` (0 for none) and ``megatron.fp8_audit_gate`` (None for none).

    Attributes:
        batches: of the run so far.
        in_high_precision: whether the gate has put the old-policy forward back to BF16.
    """

    def __init__(self, args: SimpleNamespace) -> None:
        on = args.actor.backend == "megatron" and args.megatron.fp8 is not None
        self._every = args.megatron.fp8_audit_steps if on else 0
        self._gate = args.megatron.fp8_audit_gate
        self.batches = 0
        self._actors_in_high_precision = False
        self.in_high_precision = False

    def before_batch(self, actors: Any, forward: Callable[[], list[TokenValues]]) -> list[TokenValues] | None:
        """Tell the actors how to compute the next batch. The first batch, and then every N-th, is audited.

        Returns:
            what ``forward`` gives without FP8 for a batch that is audited, None for the others.
        """
        if not self._every:
            return None
        due = self.batches % self._every == 0
        self.batches += 1
        exact = None
        if due:
            self._set_high_precision(actors, True)
            exact = forward()
        self._set_high_precision(actors, self.in_high_precision and not due)
        return exact

    def _set_high_precision(self, actors: Any, on: bool) -> None:
        if on is not self._actors_in_high_precision:
            ray.get(actors.async_run_method(method_name="set_high_precision", on=on))
            self._actors_in_high_precision = on

    def compare(self, batch: RolloutBatch, exact: TokenValues, credit: EntropyCredit) -> dict[str, float]:
        """Metrics of an audited batch, both passes (B, T) in sampling order. Sets :attr:`in_high_precision`."""
        assert batch.values is not None
        budget = credit.error_budget(exact, batch.values, batch.mask, batch.outcome, batch.group_ids)
        closed = self._gate is not None and budget.sign_flips > self._gate
        if closed and not self.in_high_precision:
            print(
                f"FP8 changes the sign of {budget.sign_flips:.2%} of the advantages, more than "
                f"--megatron.fp8_audit_gate {self._gate:g}: the old-policy forward falls back to BF16, "
                "from this batch on."
            )
        elif self.in_high_precision and not closed:
            print(
                f"FP8 changes the sign of {budget.sign_flips:.2%} of the advantages: the old-policy forward is in FP8 "
                "again."
            )
        self.in_high_precision = closed
        found = {names.FP8_PREFIX + name: value for name, value in dataclasses.asdict(budget).items()}
        return found | {names.FP8_IN_USE: float(not closed)}
