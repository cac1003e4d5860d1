"""The FP8 audit in the controller, which compares entropies of FP8's forward pass with BF16's.

The gate bounds the fraction of advantages that change sign. If it closes, only entropies come from an extra forward
pass in BF16. Log-probs stay in FP8, as in training: their ratio to BF16's would contain FP8's error.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import ErrorBudget
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.audit import AuditedFeature, Source
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
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


class FP8AuditInController(AuditedFeature):
    """The audits of FP8's entropies; BF16's replace them while the gate is closed."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args, _SOURCE, args.megatron.fp8_audit_steps, args.megatron.fp8_audit_gate)
        self._actors: Any = None

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


def _in_use(values: TokenValues, exact: TokenValues) -> TokenValues:
    return TokenValues(values.log_probs, exact.entropy)
