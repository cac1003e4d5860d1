"""The batches of a GTPO step for benchmarks, made without OpenRLHF: random tokens in rows of long-tailed lengths."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf_gtpo.megatron.model.token_batch import TokenBatch, pad_right

# Of log-lengths. The longest of some hundred responses is then about ten times the median, as in runs of reasoning
# models.
_TAIL = 0.9


@dataclass(frozen=True)
class StepBatch:
    """All rows of one train step.

    Fields:
        micro_batches: of at most as many tokens as were asked for, a longer row alone.
        outcome: (B,) 1 or 0, half of each in every group; rows in the order of the micro-batches.
        group_ids: (B,).
        tokens: real ones, prompts included.
    """

    micro_batches: list[TokenBatch]
    outcome: Tensor
    group_ids: Tensor
    tokens: int


def step_batch(
    prompts: int, samples: int, prompt_tokens: int, response_tokens: int, max_tokens: int, vocabulary: int, seed: int
) -> StepBatch:
    """``prompts`` groups of ``samples`` responses of at most ``response_tokens`` tokens each."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in long_tailed_lengths(prompts * samples, response_tokens, seed).tolist():
        tokens = torch.randint(vocabulary, (prompt_tokens + length,), generator=generator)
        rows.append((tokens, torch.arange(len(tokens)) >= prompt_tokens))
    members = first_fit([len(tokens) for tokens, _ in rows], max_tokens)
    order = torch.tensor([row for part in members for row in part])
    return StepBatch(
        micro_batches=[pad_right([rows[i] for i in part]) for part in members],
        outcome=(order % 2).float(),
        group_ids=order // samples,
        tokens=sum(len(tokens) for tokens, _ in rows),
    )


def first_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices into ``lengths``, the longest first, each in the first micro-batch with room; a longer row alone."""
    parts: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = next((i for i, free in enumerate(room) if free >= lengths[row]), None)
        if place is None:
            parts.append([])
            room.append(max_tokens)
            place = len(parts) - 1
        parts[place].append(row)
        room[place] -= lengths[row]
    return parts


def uniform_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, all from half of ``longest`` to ``longest`` alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(longest // 2, longest + 1, (rows,), generator=generator)


def long_tailed_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, log-normal with median ``longest / 6`` and cut off at ``longest``, as by a token limit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = longest / 6 * (_TAIL * torch.randn(rows, generator=generator)).exp()
    return lengths.round().clamp(1, longest).long()
