"""A rollout batch in sampling order, gathered from upstream's permuted micro-batches and scattered back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor

from openrlhf_gtpo.algorithms import SURROGATES, success
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit
from openrlhf_gtpo.training.rows import Row


@dataclass
class RolloutBatch:
    """A rollout's rows in sampling order: the G responses to a prompt are adjacent. B rows, T columns."""

    order: Tensor  # (B,) place in sampling order of each row of the concatenated micro-batches (Experience.index)
    mask: Tensor  # (B, T) bool, True at action tokens
    outcome: Tensor  # (B,) rewards before any length penalty, in their original precision, for comparisons
    group_ids: Tensor  # (B,) int, one per prompt
    values: TokenValues | None  # (B, T), the old policy's; None if the run does not capture entropies
    kl: Tensor  # (B, T)
    reference_log_probs: Tensor | None  # (B, T); None if KL is not a loss
    prompts: list[str]  # B texts, for messages
    off_policy: Tensor  # (B,) bool, rows of another sampler (see ``Row``)
    versions: Tensor | None = None  # (B, T) int, version of an action's weights, or -1; None if not reported
    texts: list[dict[str, str]] = field(default_factory=list)  # B, texts of rewards or agents, by name
    labels: list[Any] = field(default_factory=list)  # B

    @classmethod
    def gather(
        cls,
        experiences: Sequence[Experience],
        values: Sequence[TokenValues] | None,
        rollout: Sequence[Row],
        samples_per_prompt: int,
    ) -> "RolloutBatch":
        """Gather the batch from its micro-batches and rows.

        Args:
            experiences: micro-batches.
            values: (b, t) of each, or None.
            rollout: all their rows, in sampling order.
        """
        firsts = [row for row in rollout[::samples_per_prompt] for _ in range(samples_per_prompt)]
        assert [row.number for row in rollout] == [
            row.number for row in firsts
        ], "a group mixes prompts, such as after a checkpoint with another --rollout.n_samples_per_prompt"
        order = torch.tensor([row for experience in experiences for row in experience.index])
        width = max(experience.action_mask.shape[1] for experience in experiences)

        def rows(tensors: Sequence[Tensor]) -> Tensor:
            return _in_rows(tensors, order, width)

        reference = experiences[0].base_action_log_probs
        return cls(
            order=order,
            mask=rows([e.action_mask.bool() for e in experiences]),
            outcome=in_sampling_order(torch.cat([e.rewards for e in experiences]), order),
            group_ids=torch.arange(len(order)) // samples_per_prompt,
            values=None if values is None else TokenValues(*(rows(v) for v in zip(*values, strict=True))),
            kl=rows([e.kl for e in experiences]),
            reference_log_probs=None if reference is None else rows([e.base_action_log_probs for e in experiences]),
            prompts=[row.prompt for row in rollout],
            off_policy=torch.tensor([row.off_policy for row in rollout]),
            versions=_versions(rollout, width),
            texts=[row.texts for row in rollout],
            labels=[row.label for row in rollout],
        )

    def in_rows(self, values: Sequence[TokenValues]) -> TokenValues:
        """Arrange each micro-batch's (b, t) values as (B, T) in sampling order, 0 where a micro-batch is narrower."""
        width = self.mask.shape[1]
        return TokenValues(*(_in_rows(tensors, self.order, width) for tensors in zip(*values, strict=True)))

    def scatter(self, values: Tensor, experiences: Sequence[Experience]) -> list[Tensor]:
        """Cut (B, T) values in sampling order into the micro-batches' own shapes."""
        pieces = self.split(values, experiences)
        return [p[:, : e.action_mask.shape[1]].contiguous() for p, e in zip(pieces, experiences, strict=True)]

    def split(self, values: Tensor, experiences: Sequence[Experience]) -> tuple[Tensor, ...]:
        """Cut (B, ...) values in sampling order into the rows of the micro-batches."""
        return values[self.order].split([len(e.index) for e in experiences])

    def check_finite(self) -> None:
        """Raise TrainingStopped, with the first bad row and its prompt, if a value is not finite."""
        assert self.values is not None
        bad_rows = {"reward": ~torch.isfinite(self.outcome)}
        for name, tokens in (
            ("log-prob", self.values.log_probs),
            ("entropy", self.values.entropy),
            ("reference log-prob", self.reference_log_probs),
            ("KL to the reference model", self.kl),
        ):
            if tokens is not None:
                bad_rows[name] = (~torch.isfinite(tokens) & self.mask).any(dim=-1)
        for name, bad in bad_rows.items():
            if bad.any():
                row = int(bad.nonzero()[0])
                raise TrainingStopped(
                    f"Row {row} of the rollout batch ({int(bad.sum())} of {len(bad)} rows are affected) has a {name} "
                    "that is not finite; the step stopped before any weight changed. Its prompt: "
                    f"{self.prompts[row]!r}"
                )

    def succeeded(self, credit: EntropyCredit | None) -> Tensor:
        """Return (B,) bool, True for successes by the estimator's ``success_threshold``."""
        return success(self.outcome, 1.0 if credit is None else credit.config.success_threshold)

    def note_outcomes(self, experiences: Sequence[Experience], loss_type: str, credit: EntropyCredit | None) -> None:
        """Put into ``info`` whether each row is correct, and which fraction of its group is, if the surrogate reads
        these."""
        kind = SURROGATES.get(loss_type)
        if kind is None or "correct" not in kind.reads:
            return
        correct = self.succeeded(credit).float()
        groups = correct.view(int(self.group_ids.max()) + 1, -1)
        accuracy = groups.mean(dim=-1, keepdim=True).expand_as(groups).flatten()
        for name, rows in ((names.GROUPS_CORRECT, correct), (names.GROUPS_ACCURACY, accuracy)):
            for experience, part in zip(experiences, self.split(rows, experiences), strict=True):
                experience.info[name] = part

    def metrics(self, experiences: Sequence[Experience], credit: EntropyCredit | None) -> dict[str, float]:
        """Compute a run's main metrics for this batch and its ``experiences``. Leaves out means over no tokens."""
        # Rewards and groups.
        succeeded = self.succeeded(credit)
        num_groups = int(self.group_ids.max()) + 1
        by_group, succeeded_by_group = self.outcome.float().view(num_groups, -1), succeeded.view(num_groups, -1)
        uniform = succeeded_by_group.all(dim=-1) | ~succeeded_by_group.any(dim=-1)
        metrics = {
            names.REWARD_MEAN: by_group.mean().item(),
            names.REWARD_MEAN_AT_G: by_group.mean(dim=-1).mean().item(),
            names.REWARD_BEST_AT_G: by_group.amax(dim=-1).mean().item(),
            names.GROUPS_UNIFORM: float(uniform.sum()),
            names.GROUPS_TOTAL: float(num_groups),
            names.RESPONSE_LENGTH_MEAN: self.mask.sum(dim=-1).float().mean().item(),
        }
        # Advantages, entropies and their shares.
        advantages = torch.cat([e.advantages[e.action_mask.bool()] for e in experiences])
        if advantages.numel():
            metrics |= {names.ADVANTAGE_MEAN: advantages.mean().item(), names.ADVANTAGE_MAX: advantages.max().item()}
        if self.values is None:
            return metrics
        for name, mask in (
            (names.ENTROPY_ALL, self.mask),
            (names.ENTROPY_POSITIVE, self.mask & succeeded.unsqueeze(-1)),
            (names.ENTROPY_NEGATIVE, self.mask & ~succeeded.unsqueeze(-1)),
        ):
            if mask.any():
                metrics[name] = self.values.entropy[mask].mean().item()
        if credit is not None and credit.estimator.level == "token":
            shares = credit.shares(self.values.entropy, self.mask, self.outcome, self.group_ids)
            if shares.numel() > 1:
                metrics[names.SHARES_STD] = shares.std().item()
        return metrics


def _versions(rows: Sequence[Row], width: int) -> Tensor | None:
    versions = torch.full((len(rows), width), -1)
    for found, row in zip(versions, rows, strict=True):
        if row.versions is None:
            return None
        found[: len(row.versions) - 1] = torch.from_numpy(row.versions[1:])
    return versions


def _in_rows(values: Sequence[Tensor], order: Tensor, width: int) -> Tensor:
    padded = torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in values])
    return in_sampling_order(padded, order)


def in_sampling_order(values: Tensor, order: Tensor) -> Tensor:
    """Move each of the concatenated micro-batches' (B, ...) rows to its place ``order`` (B,) in sampling order."""
    result = torch.empty_like(values)
    result[order] = values
    return result
