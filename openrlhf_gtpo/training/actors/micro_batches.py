"""Micro-batches filled by token count: from OpenRLHF's padded batches to rows of tokens, and results back again."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions
from torch import Tensor

from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.token_values import MicroBatch, TokenRow, TokenValues, place
from openrlhf_gtpo.training.rows import ROUTES

# (sequences (b, T), attention mask (b, T), action mask (b, A) of the last A columns), padded on either side; a fourth
# entry, if there is one, has further inputs of each row, as upstream's ``mm_train_inputs``.
PaddedBatch = tuple[Any, ...]


def prompts_of(rows: Iterable[Experience]) -> list[Prompt]:
    """Return the prompts of experiences of one row each."""
    return [Prompt.of(*token_row(row.sequences, row.attention_mask, row.action_mask)) for row in rows]


def fill_micro_batches(
    lengths: Sequence[int], max_tokens: int, prompts: Sequence[Prompt] | None = None
) -> list[list[int]]:
    """Split rows into micro-batches of similar size with at most ``max_tokens`` tokens; returns indices into
    ``lengths``.

    It makes about as few as first-fit does. A row longer than ``max_tokens`` gets a micro-batch to itself.
    The same lengths (each at least 1) give the same micro-batches in every process.

    Args:
        prompts: each row's prompt, if a micro-batch computes it once for all rows that share it. Such rows stay
            together; where they do not fit, each part of them computes the prompt.
    """
    # Rows of one prompt stay together: a group that is too large is cut into pieces, each of which has the prompt.
    together: list[list[int]] = [[row] for row in range(len(lengths))]
    if prompts is not None:
        together = []
        groups: dict[Prompt, list[int]] = {}
        for row, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(row)
        for prompt, rows in groups.items():
            together.append([])
            tokens = prompt.length
            for row in rows:
                own = lengths[row] - prompt.length
                if together[-1] and tokens + own > max_tokens:
                    together.append([])
                    tokens = prompt.length
                together[-1].append(row)
                tokens += own
    sizes = [computed_tokens(lengths, prompts, rows) for rows in together]
    # Pieces beyond the limit get a micro-batch each; the others are balanced over as few as first-fit needs.
    full = [rows for rows, size in zip(together, sizes) if size > max_tokens]
    together = [rows for rows, size in zip(together, sizes) if size <= max_tokens]
    sizes = [size for size in sizes if size <= max_tokens]
    if not together:
        return full
    count = get_minimum_num_micro_batch_size(sorted(sizes, reverse=True), max_tokens, 1, 1)
    while True:
        parts = get_seqlen_balanced_partitions(sizes, count, equal_size=False)
        if all(sum(sizes[i] for i in part) <= max_tokens for part in parts):
            return full + [sorted(row for i in part for row in together[i]) for part in parts]
        # Balancing looks only at sums and may overfill where first-fit did not. One each always fits.
        count = min(len(together), count + 1 + count // 32)


def token_row(
    sequence: Tensor, attention_mask: Tensor, action_mask: Tensor, inputs: Mapping[str, Tensor] | None = None
) -> TokenRow:
    """Strip the padding from a row: ``sequence`` and ``attention_mask``, (T,), and ``action_mask``, (A,). Add the
    routes from its ``inputs``, if there are any."""
    actions = torch.nn.functional.pad(action_mask.bool(), (len(sequence) - len(action_mask), 0))
    valid = attention_mask.bool()
    assert not (actions & ~valid).any(), "an action lies in the padding"
    if inputs is None or ROUTES not in inputs:
        return sequence[valid], actions[valid]
    assert len(inputs[ROUTES]) == int(valid.sum()), "routes must cover all tokens of their row"
    return sequence[valid], actions[valid], inputs[ROUTES]


def forward_padded(
    batches: Sequence[PaddedBatch],
    max_tokens: int,
    forward: Callable[[list[MicroBatch]], list[TokenValues]],
    shares_prompts: bool = False,
) -> list[TokenValues]:
    """Compute the values (b, A) of every batch, in micro-batches of at most ``max_tokens`` tokens from all batches.

    Args:
        forward: maps micro-batches to the values of their actions, (N,) each, row after row.
        shares_prompts: whether it computes each prompt of a micro-batch once.
    """
    # Into rows, micro-batches and their values; then each row's values go back to its batch.
    rows = [token_row(*row) for batch in batches for row in zip(*batch, strict=True)]
    prompts = [Prompt.of(*row[:2]) for row in rows] if shares_prompts else None
    members = fill_micro_batches([len(row[0]) for row in rows], max_tokens, prompts)
    results = forward([[rows[i] for i in part] for part in members])
    values: list[Tensor] = [torch.empty(0)] * len(rows)  # of each row, (2, its actions)
    for part, result in zip(members, results, strict=True):
        row_values = torch.stack(result).split([int(rows[i][1].sum()) for i in part], dim=1)
        for i, both in zip(part, row_values, strict=True):
            values[i] = both
    placed, first = [], 0
    for _, _, action_mask, *_ in batches:
        flat = torch.cat(values[first : first + len(action_mask)], dim=1)
        placed.append(TokenValues(*(place(numbers, action_mask.bool()) for numbers in flat)))
        first += len(action_mask)
    return placed
