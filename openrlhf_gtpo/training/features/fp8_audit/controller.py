"""In the controller: compares entropies of FP8's forward pass with BF16's.

The gate is on the advantages that change sign. If it closes, the entropies alone come from a forward pass in BF16 of
their own: training is in FP8 too, and a ratio of its log-probs to BF16's would have FP8's error in it.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import ErrorBudget
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.audit import Audit, Source
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rows import Row

_SOURCE = Source(
    "sign_flips",
    "FP8 changes the sign of {:.2%} of the advantages",
    "--megatron.fp8_audit_gate",
    "entropies fall back to BF16",
    "entropies are FP8's again",
    {field.name: names.FP8_PREFIX + field.name for field in dataclasses.fields(ErrorBudget)},
    names.FP8_IN_USE,
)
_AUDIT = "audit"  # in a checkpoint


class FP8AuditInController(ControllerFeature):
    """Audits FP8's entropies, and replaces them while the gate is closed."""

    def __init__(self, args: SimpleNamespace) -> None:
        super().__init__(args)
        self.credit = entropy_credit(args)
        every = 0 if self.credit is None else args.megatron.fp8_audit_steps
        self.audit = Audit(_SOURCE, every, args.megatron.fp8_audit_gate)
        self._actors: Any = None
        self._exact: list[TokenValues] | None = None  # of a batch that is audited
        self._metrics: dict[str, float] = {}

    def begin(self, run: Any) -> None:
        self._actors = run.models.actor

    def policy_values(
        self,
        batches: Sequence[Experience],
        rows: Sequence[Row],
        own: bool,
        split: Callable[[Sequence[Row]], list[Experience]],
        forward: Callable[[Sequence[Experience]], list[TokenValues]],
    ) -> list[TokenValues]:
        due = own and self.audit.due()
        if own:
            self._metrics = {}
        if not (due or self.audit.closed):
            return forward(batches)
        ray.get(self._actors.async_run_method(method_name="set_high_precision", on=True))
        exact = forward(batches)
        ray.get(self._actors.async_run_method(method_name="set_high_precision", on=False))
        values = forward(batches)
        if due:
            self._exact = exact
            return values
        return [_in_use(*both) for both in zip(values, exact, strict=True)]

    def on_values(self, batch: RolloutBatch) -> None:
        if self._exact is None:
            return
        assert self.credit is not None and batch.values is not None
        exact, self._exact = batch.in_rows(self._exact), None
        self._metrics = self.audit.compare(batch, exact, batch.mask, self.credit)
        if self.audit.closed:
            batch.values = _in_use(batch.values, exact)

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        metrics |= self._metrics

    def state(self) -> dict[str, Any]:
        return {_AUDIT: self.audit.state()}

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self.audit.restore(state.get(_AUDIT, (0, False)))


def _in_use(values: TokenValues, exact: TokenValues) -> TokenValues:
    return TokenValues(values.log_probs, exact.entropy)
