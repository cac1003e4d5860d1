"""Padded rows of tokens, some of them actions: what a model is asked about. Knows torch alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of padded rows.

    Fields:
        sequences: (B, T) token ids.
        attention_mask: (B, T), 1 at real tokens, which are consecutive in a row; padding on either side.
        action_mask: (B, A), A < T, 1 where the token of the last A columns is an action. A row's first real token is
            never one: nothing predicts it.
    """

    sequences: Tensor
    attention_mask: Tensor
    action_mask: Tensor

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted."""
        return int(self.attention_mask.sum())


def pad_right(rows: Sequence[tuple[Tensor, Tensor]]) -> TokenBatch:
    """Rows of (token ids (n,), which of them are actions (n,) bool) as one batch, padded on the right; A = T - 1."""
    tokens = pad_sequence([row for row, _ in rows], batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row, _ in rows], batch_first=True)
    actions = pad_sequence([marks for _, marks in rows], batch_first=True)
    return TokenBatch(tokens, mask, actions[:, 1:])
