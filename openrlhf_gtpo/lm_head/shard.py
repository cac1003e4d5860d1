"""This rank's columns of the vocabulary, and the communication within a tensor-parallel group.

Owns every collective of this package and the checks that ranks agree. Knows nothing about products.

The shards may have any size, including 0, and follow each other in rank order, as Megatron lays them out (there they
all have the same size, and the last ones end in padding).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from .softmax import TokenStatistics


@dataclass(frozen=True)
class VocabularyShard:
    """Columns [offset, offset + columns) of the vocabulary are the first `columns` rows of this rank's weight."""

    offset: int
    columns: int
    vocab_size: int
    group: dist.ProcessGroup | None

    @classmethod
    def describe(
        cls, labels: Tensor, local_columns: int, vocab_size: int | None, group: dist.ProcessGroup | None
    ) -> "VocabularyShard":
        """Find this rank's columns, and check that the labels (T,) and `vocab_size` agree on all ranks.

        An all-gather of five integers makes a mistake the same `ValueError` on every rank of the group, and never a
        hang. The check costs one pass over T integers.
        """
        lowest, highest = torch.stack(labels.aminmax()).tolist() if labels.numel() else (0, -1)
        local = (local_columns, labels.numel(), -1 if vocab_size is None else vocab_size, lowest, highest)
        ranks = [local]
        if _is_sharded(group):
            ranks = torch.stack(_gather(torch.tensor(local, device=labels.device), group)).tolist()
        sizes, tokens, vocab_sizes, lows, highs = zip(*ranks, strict=True)
        if len(set(tokens)) > 1 or len(set(vocab_sizes)) > 1:
            raise ValueError(
                f"the ranks of group must agree on the number of tokens and on vocab_size; they have {list(tokens)} "
                f"tokens and vocab_size {[None if size < 0 else size for size in vocab_sizes]}"
            )
        total = sum(sizes)
        real = total if vocab_size is None else vocab_size
        if real > total:
            raise ValueError(f"vocab_size is {real} but weight has only {total} columns over all shards")
        if min(lows) < 0 or max(highs) >= real:
            bad = min(lows) if min(lows) < 0 else max(highs)
            raise ValueError(f"labels has the token id {bad}, outside the vocabulary [0, {real})")
        rank = 0 if group is None else dist.get_rank(group)
        offset = sum(sizes[:rank])
        return cls(offset, max(0, min(local_columns, real - offset)), real, group)

    def merged(self, statistics: TokenStatistics, bits_per_logit: float) -> TokenStatistics:
        """Merge statistics of all shards: one all-gather of (3 or 4, T) numbers, merged in rank order on every rank.

        Gathered rather than reduced so that all ranks hold bitwise the same result.
        """
        if not _is_sharded(self.group):
            return statistics
        total, *others = (TokenStatistics.unpacked(rows) for rows in _gather(statistics.packed(), self.group))
        for other in others:
            total.merge_(other, bits_per_logit)
        return total

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over the shards, in place."""
        if _is_sharded(self.group) and tensor.numel():
            dist.all_reduce(tensor, group=self.group)
        return tensor


def _is_sharded(group: dist.ProcessGroup | None) -> bool:
    return group is not None and dist.get_world_size(group) > 1


def _gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered
