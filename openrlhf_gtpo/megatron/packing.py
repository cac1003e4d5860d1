"""Padded rows to one packed sequence (THD) and back: no token of padding is computed.

A :class:`TokenBatch` is what OpenRLHF hands over; :func:`pack` gives what Megatron's layers take.
"""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


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


@dataclass(frozen=True)
class Packed:
    """The real tokens of a micro-batch as one row.

    Fields:
        tokens: (1, P) ids; P is the number of real tokens, rounded up by a sequence of its own.
        position_ids: (1, P), from 0 in every sequence.
        params: where sequences begin, for attention and rotary embedding.
        predicts: (N,) places in the row whose hidden state predicts an action.
        labels: (N,) those actions, in the order of the True places of ``action_mask``.
        action_mask: (B, A) bool.
    """

    tokens: Tensor
    position_ids: Tensor
    params: PackedSeqParams
    predicts: Tensor
    labels: Tensor
    action_mask: Tensor

    def place(self, values: Tensor) -> Tensor:
        """(N,) values of actions to (B, A), 0 elsewhere; differentiable."""
        return values.new_zeros(self.action_mask.shape).masked_scatter(self.action_mask, values)


def pack(batch: TokenBatch, device: torch.device, multiple: int = 1) -> Packed:
    """Pack ``batch`` onto ``device``, its length rounded up to a multiple of ``multiple``.

    What is missing to the multiple is one more sequence, which no real token attends to and no action comes from.
    """
    sequences = batch.sequences.to(device)
    valid = batch.attention_mask.to(device).bool()
    actions = batch.action_mask.to(device).bool()
    width, num_actions = sequences.shape[1], actions.shape[1]
    assert num_actions < width, "the first column of a batch has nothing before it to predict it"
    labels = sequences[:, width - num_actions :][actions]
    tokens = sequences[valid]
    # The hidden state at column t predicts the token at t + 1.
    predicting = torch.nn.functional.pad(actions, (width - num_actions - 1, 1))
    assert not (predicting & ~valid).any(), "an action is the first token of its row, or lies outside it"
    place_of = valid.flatten().cumsum(0).view_as(valid) - 1
    lengths = valid.sum(-1)
    positions = (valid.cumsum(-1) - 1)[valid]
    missing = -tokens.numel() % multiple
    if missing:
        tokens = torch.cat([tokens, tokens.new_zeros(missing)])
        positions = torch.cat([positions, torch.arange(missing, device=device)])
        lengths = torch.cat([lengths, lengths.new_tensor([missing])])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return Packed(tokens.unsqueeze(0), positions.unsqueeze(0), params, place_of[predicting], labels, actions)
