"""Padded rows to one packed sequence (THD), which Megatron's layers take, and back: no token of padding is computed."""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from openrlhf_gtpo.megatron.model.token_batch import TokenBatch
from openrlhf_gtpo.megatron.parallel.context import chunks, chunks_of_rank, round_up


@dataclass(frozen=True)
class Packed:
    """The real tokens of a micro-batch as one row.

    Fields:
        tokens: (1, P) ids; P is the number of real tokens, rounded up, or this rank's share of them.
        position_ids: (1, P), from 0 in every sequence.
        params: where sequences begin, all ranks' tokens counted, for attention and rotary embedding.
        predicts: (M,) places in the row whose hidden state predicts an action.
        labels: (M,) those actions, in the order of the True places of ``action_mask``.
        action_mask: (B, A) bool.
        mine: (N,) which of all N actions the M are; None where they are all.
    """

    tokens: Tensor
    position_ids: Tensor
    params: PackedSeqParams
    predicts: Tensor
    labels: Tensor
    action_mask: Tensor
    mine: Tensor | None = None

    def place(self, values: Tensor) -> Tensor:
        """(N,) values of actions to (B, A), 0 elsewhere; differentiable."""
        return values.new_zeros(self.action_mask.shape).masked_scatter(self.action_mask, values)


def pack(batch: TokenBatch, device: torch.device, multiple: int = 1, context: tuple[int, int] = (1, 0)) -> Packed:
    """Pack ``batch`` onto ``device`` for one rank.

    What is missing to the multiple is one more sequence, which no real token attends to and no action comes from. Under
    context parallelism every sequence is also filled up at its end, where causal attention keeps it from what is before.

    Args:
        multiple: of which the number of tokens on this rank must be one.
        context: context-parallel size and rank; this rank gets its two chunks of every sequence (see ``context``).
    """
    size, rank = context
    sequences = batch.sequences.to(device)
    valid = batch.attention_mask.to(device).bool()
    actions = batch.action_mask.to(device).bool()
    width, num_actions = sequences.shape[1], actions.shape[1]
    assert num_actions < width, "the first column of a batch has nothing before it to predict it"
    labels = sequences[:, width - num_actions :][actions]
    # The hidden state at column t predicts the token at t + 1.
    predicting = torch.nn.functional.pad(actions, (width - num_actions - 1, 1))
    assert not (predicting & ~valid).any(), "an action is the first token of its row, or lies outside it"

    lengths = round_up(valid.sum(-1), chunks(size))
    missing = -int(lengths.sum()) % math.lcm(chunks(size), size * multiple)
    if missing:
        lengths = torch.cat([lengths, lengths.new_tensor([missing])])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    place_of = starts[: len(valid), None] + valid.cumsum(-1) - 1
    tokens = sequences.new_zeros(int(starts[-1]))
    tokens[place_of[valid]] = sequences[valid]
    positions = torch.arange(len(tokens), device=device) - starts[:-1].repeat_interleave(lengths)
    predicts = place_of[predicting]
    mine = None
    if size > 1:
        here = chunks_of_rank(lengths, size, rank)
        local = torch.full_like(tokens, -1)
        local[here] = torch.arange(len(here), device=device)
        tokens, positions, predicts = tokens[here], positions[here], local[predicts]
        mine = predicts >= 0
        predicts, labels = predicts[mine], labels[mine]
    longest = int(lengths.max())
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts.to(torch.int32),
        cu_seqlens_kv=starts.to(torch.int32),
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return Packed(tokens.unsqueeze(0), positions.unsqueeze(0), params, predicts, labels, actions, mine)
