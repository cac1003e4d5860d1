"""A whole rollout batch in the order in which it was sampled, out of upstream's permuted micro-batches and back."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.errors import TrainingStopped


@dataclass
class RolloutBatch:
    """Rows in sampling order, so that the G responses to one prompt are adjacent. B rows, T columns.

    Attributes:
        order: (B,) sampling-order row of each row of the concatenated micro-batches (``Experience.index``).
        mask: (B, T) bool, True at action tokens.
        outcome: (B,) the rewards before any length penalty, in the precision they came in, in which they are compared.
        group_ids: (B,) int, one per prompt.
        entropy, log_probs, kl, reference_log_probs: (B, T) float; entropy is None where the run does not capture it,
            and reference log-probs are where KL is not a loss.
        prompts: B texts, for messages.
    """

    order: torch.Tensor
    mask: torch.Tensor
    outcome: torch.Tensor
    group_ids: torch.Tensor
    entropy: torch.Tensor | None
    log_probs: torch.Tensor
    kl: torch.Tensor
    reference_log_probs: torch.Tensor | None
    prompts: list[str]

    @classmethod
    def gather(
        cls, experiences: Sequence[Experience], entropies: Sequence[torch.Tensor] | None, samples_per_prompt: int
    ) -> "RolloutBatch":
        """Collect what shaping needs. ``entropies`` has one (b, t) tensor per micro-batch, or is None."""
        order = torch.tensor([row for experience in experiences for row in experience.index])
        width = max(experience.action_mask.shape[1] for experience in experiences)

        def rows(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            return _in_rows(tensors, order, width)

        reference = experiences[0].base_action_log_probs
        outcome = torch.cat([e.rewards for e in experiences])
        prompts = [prompt for e in experiences for prompt in e.prompts]
        return cls(
            order=order,
            mask=rows([e.action_mask.bool() for e in experiences]),
            outcome=in_sampling_order(outcome, order),
            group_ids=torch.arange(len(order)) // samples_per_prompt,
            entropy=None if entropies is None else rows(list(entropies)),
            log_probs=rows([e.action_log_probs for e in experiences]),
            kl=rows([e.kl for e in experiences]),
            reference_log_probs=None if reference is None else rows([e.base_action_log_probs for e in experiences]),
            prompts=[prompts[row] for row in order.argsort().tolist()] if prompts else [""] * len(order),
        )

    def in_rows(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """One (b, t) tensor per micro-batch to (B, T) in sampling order, 0 where a micro-batch is narrower."""
        return _in_rows(values, self.order, self.mask.shape[1])

    def scatter(self, values: torch.Tensor, experiences: Sequence[Experience]) -> list[torch.Tensor]:
        """(B, T) values in sampling order, cut into the micro-batches' own shapes."""
        pieces = self.split(values, experiences)
        return [p[:, : e.action_mask.shape[1]].contiguous() for p, e in zip(pieces, experiences, strict=True)]

    def split(self, values: torch.Tensor, experiences: Sequence[Experience]) -> tuple[torch.Tensor, ...]:
        """(B, ...) values in sampling order, cut into the rows of the micro-batches."""
        return values[self.order].split([len(e.index) for e in experiences])

    def check_finite(self) -> None:
        """Raise TrainingStopped, naming the first bad row and its prompt, if the step must not be trained on."""
        self._check("reward", ~torch.isfinite(self.outcome))
        tokens = {
            "log-prob": self.log_probs,
            "entropy": self.entropy,
            "reference log-prob": self.reference_log_probs,
            "KL to the reference model": self.kl,
        }
        for name, values in tokens.items():
            if values is not None:
                self._check(name, (~torch.isfinite(values) & self.mask).any(dim=-1))

    def _check(self, name: str, bad: torch.Tensor) -> None:
        if bad.any():
            row = int(bad.nonzero()[0])
            raise TrainingStopped(
                f"Row {row} of the rollout batch ({int(bad.sum())} of {len(bad)} rows are affected) has a {name} that "
                f"is not finite; the step was stopped before any weight changed. Its prompt: {self.prompts[row]!r}"
            )


def _in_rows(values: Sequence[torch.Tensor], order: torch.Tensor, width: int) -> torch.Tensor:
    padded = torch.cat([torch.nn.functional.pad(t, (0, width - t.shape[1])) for t in values])
    return in_sampling_order(padded, order)


def in_sampling_order(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """(B, ...) rows of the concatenated micro-batches, each moved to its sampling-order row ``order`` (B,)."""
    result = torch.empty_like(values)
    result[order] = values
    return result
