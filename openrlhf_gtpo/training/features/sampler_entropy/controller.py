"""The sampler's entropies in the controller: with the rows' log-probs they replace the actors' forward pass, which
runs only if something else needs it, or for an audit.

The audit's gate bounds the error of entropies, not of advantages. An engine that missed an update is off by the same
number of nats whatever their weight in the credit, even if no sign changes.
"""

from collections.abc import Callable, Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.audit import AuditedFeature, Source
from openrlhf_gtpo.training.credit.old_policy import always_forwards
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.training.rows import Row

_SOURCE = Source(
    "entropy_error_mean",
    "The sampler's entropies are off by {:.3f} nats on average",
    "--rollout.entropy_audit_gate",
    "entropies fall back to the actor's",
    "entropies are the sampler's again",
    names.SAMPLER_AUDIT,
    names.SAMPLER_IN_USE,
)
_MAY_MISS = 0.01  # fraction of a rollout's action tokens


class SamplerEntropyInController(AuditedFeature):
    """The part that takes the old policy's values from the sampler, and audits them."""

    def __init__(self, args: Arguments) -> None:
        super().__init__(args, _SOURCE, args.rollout.entropy_audit_steps, args.rollout.entropy_audit_gate)

    def may_sample_ahead(self, steps: int = 1) -> bool:
        """Return False for audited batches, as training itself would close the gate; and while the actor's entropies,
        which belong to its current weights, are in use or may be next."""
        return not (self.audit.closed or any(map(self.audit.due_in, range(steps + 1))))

    def policy_values(
        self,
        batches: Sequence[Experience],
        rows: Sequence[Row],
        own: bool,
        split: Callable[[Sequence[Row]], list[Experience]],
        forward: Callable[[Sequence[Experience]], list[TokenValues]],
    ) -> list[TokenValues]:
        due = own and self.audit.due()
        from_sampler = _values(batches, rows)
        missing = _count_missing(batches, from_sampler, rows)
        if own:
            self._metrics = {names.SAMPLER_MISSING: float(missing)}
        if not (missing or due or self.audit.closed or always_forwards(self.args, len(rows))):
            return _with_off_policy_rows(batches, from_sampler, rows, split, forward)
        exact = forward(batches)
        self._exact = exact if due else None
        if self.audit.closed and not due:
            return exact
        return [
            TokenValues(*(torch.where(ours.isnan(), theirs, ours) for ours, theirs in zip(*both)))
            for both in zip(from_sampler, exact, strict=True)
        ]

    def on_values(self, batch: RolloutBatch) -> None:
        if self._exact is None:
            return
        assert self.credit is not None
        exact, self._exact = batch.in_rows(self._exact), None
        mask = batch.mask & ~batch.off_policy.unsqueeze(-1)  # without rows of other samplers
        self._metrics |= self.audit.compare(batch, exact, mask, self.credit)
        if self.audit.closed:
            batch.values = exact


def _values(batches: Sequence[Experience], rows: Sequence[Row]) -> list[TokenValues]:
    """Return the sampler's (b, t) values of micro-batches, 0 at padding; NaN in rows of another sampler."""
    values = []
    for batch in batches:
        columns = torch.zeros(2, *batch.action_mask.shape)
        for i, number in enumerate(batch.index):
            own = rows[number].values
            if own is None:
                columns[:, i] = torch.nan
            else:
                columns[:, i, : len(own.entropy) - 1] = torch.stack([torch.as_tensor(column[1:]) for column in own])
        values.append(TokenValues(*columns))
    return values


def _count_missing(batches: Sequence[Experience], from_sampler: Sequence[TokenValues], rows: Sequence[Row]) -> int:
    """Count action tokens without a value (NaN) from the policy's sampler, such as an agent's own, but not those in
    rows of another sampler.

    Raises:
        TrainingStopped: there are too many.
    """
    missing = actions = 0
    for batch, values in zip(batches, from_sampler, strict=True):
        own = torch.tensor([not rows[row].off_policy for row in batch.index]).unsqueeze(-1)
        mask = batch.action_mask.bool() & own
        missing += int((values.entropy.isnan() & mask).sum())
        actions += int(mask.sum())
    if missing > _MAY_MISS * actions:
        raise TrainingStopped(
            f"{missing} of the {actions} tokens to train on ({missing / actions:.1%}, more than {_MAY_MISS:.0%}) have "
            "no entropy from vLLM's sampler, for example because an agent edited its response; give "
            "--rollout.entropy actor."
        )
    return missing


def _with_off_policy_rows(
    batches: Sequence[Experience],
    from_sampler: list[TokenValues],
    rows: Sequence[Row],
    split: Callable[[Sequence[Row]], list[Experience]],
    forward: Callable[[Sequence[Experience]], list[TokenValues]],
) -> list[TokenValues]:
    """Fill in the old policy's values in rows of another sampler, by a forward over these rows alone. In a replay such
    rows have values already."""
    others = [number for number, row in enumerate(rows) if row.values is None]
    if not others:
        return from_sampler
    parts = split([rows[number] for number in others])
    values = {
        others[place]: TokenValues(*(column[i] for column in result))
        for part, result in zip(parts, forward(parts), strict=True)
        for i, place in enumerate(part.index)
    }
    filled = [TokenValues(*(column.clone() for column in each)) for each in from_sampler]
    for batch, each in zip(batches, filled, strict=True):
        for i, number in enumerate(batch.index):
            for ours, theirs in zip(each, values.get(number, ())):
                width = min(ours.shape[1], len(theirs))  # the two are padded with different micro-batches
                ours[i] = 0
                ours[i, :width] = theirs[:width]
    return filled
