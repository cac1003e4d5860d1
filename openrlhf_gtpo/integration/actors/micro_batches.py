"""Rows to micro-batches by their number of tokens, for scoring and for training."""

from collections.abc import Sequence

from openrlhf.utils.seqlen_balancing import get_minimum_num_micro_batch_size, get_seqlen_balanced_partitions


def fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of at most ``max_tokens`` tokens and of similar size, as indices into ``lengths``, each once.

    There are about as few of them as first-fit needs. A row longer than ``max_tokens`` gets one of its own. The same
    lengths (each at least 1) give the same micro-batches in every process.

    Raises:
        ValueError: ``max_tokens`` is below 1.
    """
    if max_tokens < 1:
        raise ValueError(f"A micro-batch of {max_tokens} tokens holds no row; give at least 1.")
    too_long = [[row] for row, length in enumerate(lengths) if length > max_tokens]
    return too_long + _balanced(
        [row for row, length in enumerate(lengths) if length <= max_tokens], lengths, max_tokens
    )


def _balanced(rows: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    if not rows:
        return []
    sizes = [lengths[row] for row in rows]
    count = get_minimum_num_micro_batch_size(sorted(sizes, reverse=True), max_tokens, 1, 1)
    while True:
        parts = get_seqlen_balanced_partitions(sizes, count, equal_size=False)
        if all(sum(sizes[i] for i in part) <= max_tokens for part in parts):
            return [[rows[i] for i in part] for part in parts]
        # Balancing looks at sums alone and may overfill where first-fit did not. One row each always fits.
        count = min(len(rows), count + 1 + count // 32)
