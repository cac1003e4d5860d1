"""Rows of tokens as a tree of segments, of which each is packed once.

    [prompt 1, response 1.1, response 1.2, ..., prompt 2, response 2.1, ...]

What rows have in common is found by their tokens, so nobody has to say which rows are a group, and groups share a
system prompt. A segment's tokens see those before them in the segment and all of the segments above it, and their
positions continue from there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

# A segment with this many tokens has a call of attention to itself, see ``Tree.buckets``.
_LONG = 64
_LARGE = 2**21  # numbers in a bias


@dataclass(frozen=True)
class Bucket:
    """Segments of similar sizes, S of them, padded to Q queries and K keys each.

    Fields:
        queries: (S, Q) places of their tokens in the pack; 0 where there is none.
        keys: (S, K) places of the tokens that the last query sees; 0 where there is none.
        above: (S,) tokens that the first query sees before it; None if a causal mask serves all.
    """

    queries: Tensor
    keys: Tensor
    above: Tensor | None

    @property
    def bias(self) -> Tensor | None:
        """(S, 1, Q, K) float32, -inf where a query does not see a key; None for a causal mask. Made anew each time if
        it is large: a long response after a long prompt takes as much as all of a layer's activations."""
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
        position_ids: (T,) in the rows that a token is from.
        lengths: (S,) of the segments, which lie one after another.
        paths: of each segment the (k,) places of the tokens that its last token sees, itself included.
        places: (R,) of the rows' tokens, row after row, in the pack; 0 of those that are left out.
        origin: (U,) of the packed tokens without padding, among those of the rows; of equal ones the first.
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
        """Segments for calls of padded attention; and (T,) where each token is among all buckets' queries."""
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
        """Tokens of the longest segment, and of the longest path."""
        return int(max(self.lengths)), max(map(len, self.paths))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """For kernels of packed rows: (S + 1,) int32 where segments' queries, and their paths one after another,
        begin; and (K,) int32 places of all paths. Copied to the device once, as all layers ask for them."""
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
        rows: (n,) ids of each, on the host.
        needed: how many of a row's first tokens are computed, at most n.
        routes: (n, layers, k) experts of each row's tokens; two tokens are the same only if theirs are.
        multiple: of tokens in the pack; padding is a segment of its own, which nothing sees.
    """
    order, common = _alike(rows, needed, routes)
    starts = np.cumsum([0, *map(len, rows)])
    lengths: list[int] = []
    paths: list[np.ndarray] = []
    origins: list[np.ndarray] = []
    places = np.zeros(starts[-1], np.int64)
    positions: list[np.ndarray] = []
    # Where the segments of the row end, and the paths to there.
    above: list[tuple[int, np.ndarray]] = [(0, np.empty(0, np.int64))]
    total = 0
    for number, row in enumerate(order):
        # Back to where this row parts from the one before it, which was cut there.
        while above[-1][0] > common[number]:
            above.pop()
        begin, path = above[-1]
        assert begin == common[number]
        # Its own tokens, cut wherever one of the next rows parts from it.
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
    """Rows, by number, in an order in which those that begin alike are neighbors; and how many of its first tokens
    each has in common with the one before it."""
    records = []  # (needed, bytes) of all that the model takes of a token
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
    """Where rows after ``number`` part from it beyond what it has in common with the one before it, in order."""
    ends: list[int] = []
    for end in common[number + 1 :]:
        if end <= common[number]:
            break
        if not ends or end < ends[-1]:
            ends.append(end)
    return ends[::-1]
