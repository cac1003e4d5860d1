"""OpenRLHF's padded batches to Megatron's micro-batches of as many tokens as fit, and results back to their places."""

from collections.abc import Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor

from openrlhf_gtpo.integration.actors.micro_batches import fill
from openrlhf_gtpo.megatron.model.token_batch import TokenBatch, pad_right
from openrlhf_gtpo.token_values import TokenValues


def token_batch(experience: Experience) -> TokenBatch:
    """The rows of an experience as one micro-batch."""
    return TokenBatch(experience.sequences, experience.attention_mask, experience.action_mask)


class Repacked:
    """The rows of several batches, cut anew into micro-batches of at most ``max_tokens`` tokens."""

    def __init__(self, batches: Sequence[TokenBatch], max_tokens: int) -> None:
        self._batches = batches
        rows = [row for batch in batches for row in _rows(batch)]
        self._actions = [actions for _, actions in rows]
        self._members = fill([tokens.numel() for tokens, _ in rows], max_tokens)
        self.micro_batches = [pad_right([rows[i] for i in members]) for members in self._members]

    def restore(self, results: Sequence[TokenValues]) -> list[TokenValues]:
        """Results of :attr:`micro_batches` as (b, A) tensors of the batches that were given, in their order."""
        values: list[Tensor] = [torch.empty(0)] * len(self._actions)  # per row: (2, its actions)
        for members, result in zip(self._members, results, strict=True):
            both = torch.stack(result)
            for place, row in enumerate(members):
                actions = self._actions[row][1:]
                values[row] = both[:, place, : actions.numel()][:, actions]
        restored, first = [], 0
        for batch in self._batches:
            mask = batch.action_mask.bool()
            flat = torch.cat(values[first : first + len(mask)], dim=1)
            both = flat.new_zeros(2, *mask.shape)
            both[:, mask] = flat
            restored.append(TokenValues(both[0], both[1]))
            first += len(mask)
        return restored


def _rows(batch: TokenBatch) -> list[tuple[Tensor, Tensor]]:
    """(tokens (n,), which of them are actions (n,)) of every row, without padding."""
    valid = batch.attention_mask.bool()
    missing = batch.sequences.shape[1] - batch.action_mask.shape[1]
    actions = torch.nn.functional.pad(batch.action_mask.bool(), (missing, 0))
    return [(batch.sequences[i][valid[i]], actions[i][valid[i]]) for i in range(len(valid))]
