"""Rows of tokens as a tree of segments, each of which is packed once.

    [prompt 1, response 1.1, response 1.2, ..., prompt 2, response 2.1, ...]

Common beginnings are found by comparing tokens. Callers need not say which rows are a group, and groups share a system
prompt. A segment's tokens see the earlier tokens of the segment and all segments above it. Their positions continue
from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# A segment with this many tokens gets an attention call of its own, see ``Tree.buckets``.
_LONG = 64
_LARGE = 2**21  # elements of a bias


@dataclass(frozen=True)
class Bucket:
    """Segments of similar sizes, S of them, padded to Q queries and K keys each.

    Fields:
        queries: (S, Q) positions of their tokens in the pack; 0 for padding.
        keys: (S, K) positions of the tokens that the last query sees; 0 for padding.
        above: (S,) tokens that the first query sees before itself; None if a causal mask fits all.
    """

    queries: Tensor
    keys: Tensor
    above: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """(S, 1, Q, K) float32, -inf where a query does not see a key; None for a causal mask. A large bias is not
        cached: a long response after a long prompt takes as much memory as all of a layer's activations."""
        if self.above is None:
            return None
        return (
            self._bias if len(self.above) * self.queries.shape[1] * self.keys.shape[1] < _LARGE else self._make_bias()
        )

    @cached_property
    def _bias(self) -> Tensor:
        return self._make_bias()

    def _make_bias(self) -> Tensor:
        assert self.above is not None
        queries, keys = torch.arange(self.queries.shape[1]), torch.arange(self.keys.shape[1])
        sees = queries[:, None] + self.above[:, None, None] >= keys
        return torch.zeros(sees.shape).masked_fill_(~sees, -torch.inf).unsqueeze(1)


@dataclass(frozen=True, eq=False)
class Tree:
    """R tokens of rows, packed as T tokens in S segments, on the host.

    Fields:
        tokens: (T,) ids.
        position_ids: (T,) position of each token in its rows.
        lengths: (S,) lengths of the segments, in order.
        paths: for each segment the (k,) positions in the pack of the tokens that its last token sees, itself included.
        places: (R,) position in the pack of each token of the rows, row after row; 0 for tokens that are left out.
        origin: (U,) for each packed token, without padding, its first index among the rows' tokens.
    """

    tokens: Tensor
    position_ids: Tensor
    lengths: np.ndarray
    paths: list[np.ndarray]
    places: Tensor
    origin: Tensor
    _on_device: list[Tensor] = field(default_factory=list)

    @cached_property
    def buckets(self) -> tuple[list[Bucket], Tensor]:
        """Segments grouped for calls of padded attention, and (T,) each token's index among all buckets' queries."""
        members: dict[object, list[int]] = {}
        for number, (length, path) in enumerate(zip(self.lengths.tolist(), self.paths, strict=True)):
            similar = (length - 1).bit_length(), (len(path) - 1).bit_length()
            members.setdefault(similar if length < _LONG else number, []).append(number)
        starts = np.cumsum([0, *self.lengths])
        back = np.empty(starts[-1], np.int64)
        buckets, before = [], 0
        for numbers in members.values():
            lengths = self.lengths[numbers]
            above = np.array([len(self.paths[number]) for number in numbers]) - lengths
            most, deepest = int(lengths.max()), int((above + lengths).max())
            queries: np.ndarray = np.zeros((len(numbers), most), np.int64)
            keys: np.ndarray = np.zeros((len(numbers), deepest), np.int64)
            for i, number in enumerate(numbers):
                own, path = slice(starts[number], starts[number + 1]), self.paths[number]
                queries[i, : lengths[i]] = np.arange(own.start, own.stop)
                keys[i, : len(path)] = path
                back[own] = before + i * most + np.arange(lengths[i])
            before += queries.size
            causal = not above.any() and bool((lengths == most).all())
            places = torch.from_numpy(queries), torch.from_numpy(keys)
            buckets.append(Bucket(*places, None if causal else torch.from_numpy(above)))
        return buckets, torch.from_numpy(back)

    @property
    def longest(self) -> tuple[int, int]:
        """Length of the longest segment, and of the longest path, in tokens."""
        return int(max(self.lengths)), max(map(len, self.paths))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels of packed rows: (S + 1,) int32 offsets of segments' queries, the same of their concatenated
        paths, and (K,) int32 positions of all paths. Copied to the device once, because all layers need them."""
        if not self._on_device:
            ends = [np.cumsum([0, *n]) for n in (self.lengths, list(map(len, self.paths)))]
            host = (*ends, np.concatenate(self.paths))
            self._on_device.extend(torch.from_numpy(part.astype(np.int32)).to(device) for part in host)
        queries, keys, places = self._on_device
        return queries, keys, places


def pack_tree(
    rows: Sequence[Tensor], needed: Sequence[int], routes: Sequence[Tensor] | None = None, multiple: int = 1
) -> Tree:
    """Pack rows.

    Args:
        rows: each row's (n,) ids, on the host.
        needed: how many of a row's first tokens to compute, at most n.
        routes: (n, layers, k) experts of each row's tokens. Tokens are equal only if their experts are.
        multiple: the pack's length is a multiple of this. Padding is a segment of its own, which nothing sees.
    """
    order, common = _alike(rows, needed, routes)
    starts = np.cumsum([0, *map(len, rows)])
    lengths: list[int] = []
    paths: list[np.ndarray] = []
    origins: list[np.ndarray] = []
    places = np.zeros(starts[-1], np.int64)
    positions: list[np.ndarray] = []
    # Ends of the current row's segments, and the paths to them.
    above: list[tuple[int, np.ndarray]] = [(0, np.empty(0, np.int64))]
    total = 0
    for number, row in enumerate(order):
        # Go back to where this row parts from the previous one, which was cut there.
        while above[-1][0] > common[number]:
            above.pop()
        begin, path = above[-1]
        assert begin == common[number]
        # Add its own tokens, cut wherever a later row parts from it.
        for end in [*_partings(common, number), needed[row]]:
            if end > begin:
                path = np.concatenate([path, np.arange(total, total + end - begin)])
                lengths.append(end - begin)
                paths.append(path)
                positions.append(np.arange(begin, end))
                origins.append(np.arange(starts[row] + begin, starts[row] + end))
                above.append((end, path))
                total += end - begin
                begin = end
        places[starts[row] : starts[row] + needed[row]] = path
    padding = -total % multiple if total else multiple
    if padding:
        lengths.append(padding)
        paths.append(np.arange(total, total + padding))
        positions.append(np.arange(padding))
    origin = torch.from_numpy(np.concatenate([np.empty(0, np.int64), *origins]))
    ids = torch.nn.functional.pad(torch.cat(list(rows))[origin], (0, padding))
    position_ids = torch.from_numpy(np.concatenate(positions))
    return Tree(ids, position_ids, np.array(lengths), paths, torch.from_numpy(places), origin)


def _alike(
    rows: Sequence[Tensor], needed: Sequence[int], routes: Sequence[Tensor] | None
) -> tuple[list[int], list[int]]:
    """Row numbers, ordered so that rows with common beginnings are neighbors, and how many first tokens each shares
    with the previous one."""
    records = []  # (needed, bytes) of all that the model reads of a token
    for number, (ids, count) in enumerate(zip(rows, needed, strict=True)):
        parts = [ids[:count].numpy().astype(np.int32)[:, None]]
        if routes is not None:
            parts.append(routes[number][:count].flatten(1).numpy())
        records.append(np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1))
    keys = [record.tobytes() for record in records]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [0] * len(rows)
    for number in range(1, len(rows)):
        one, other = (records[row] for row in order[number - 1 : number + 1])
        both = min(len(one), len(other))
        differ = (one[:both] != other[:both]).any(1)
        common[number] = int(differ.argmax()) if differ.any() else both
    return order, common


def _partings(common: Sequence[int], number: int) -> list[int]:
    """Where later rows part from row ``number``, beyond its common beginning with the previous row, in order."""
    ends: list[int] = []
    for end in common[number + 1 :]:
        if end <= common[number]:
            break
        if not ends or end < ends[-1]:
            ends.append(end)
    return ends[::-1]
