"""Packs the rows of a micro-batch into one sequence (THD) for Megatron's layers, so that no padding is computed."""

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from openrlhf_gtpo.megatron.parallel.context import chunks_of_rank
from openrlhf_gtpo.shared_prompts.tree import Tree, pack_tree
from openrlhf_gtpo.token_values import MicroBatch


@dataclass
class TreeParams(PackedSeqParams):
    """Parameters of one sequence of all tokens, with rotary frequencies token by token and attention by the tree."""

    tree: Tree | None = None


@dataclass(frozen=True)
class Packed:
    """The tokens of a micro-batch as one sequence.

    Fields:
        tokens: (1, P) ids; P is the number of tokens, rounded up, or this rank's part of them.
        position_ids: (1, P), from 0 in every row.
        params: where rows begin, counting all ranks' tokens, for attention and rotary embedding.
        predicts: (M,) positions whose hidden state predicts an action.
        labels: (M,) those actions, row after row.
        is_local: (N,) which of all N actions are the M here; None if all are.
        routes: (P, layers, k) experts as in a ``TokenRow``; None if the routers decide everywhere.
    """

    tokens: Tensor
    position_ids: Tensor
    params: PackedSeqParams
    predicts: Tensor
    labels: Tensor
    is_local: Tensor | None = None
    routes: Tensor | None = None


def pack(
    micro_batch: MicroBatch, device: torch.device, multiple: int = 1, context: tuple[int, int] = (1, 0)
) -> Packed:
    """Pack ``micro_batch`` from the host onto ``device`` for one rank, without waiting for the device's computation.

    Padding to the multiple is an extra row. No real token attends to it, and it has no actions. Under context
    parallelism every row is also padded at its end, where causal attention hides the padding from the tokens before.

    Args:
        multiple: the number of tokens on this rank must be a multiple of this.
        context: context-parallel size and rank; this rank gets its two chunks of every row (see ``parallel.context``).
    """
    # Lengths in whole chunks, and a last row that pads to the multiple.
    size, rank = context
    assert not any(bool(row[1][0]) for row in micro_batch), "a row's first token is an action"
    real = torch.tensor([len(row[0]) for row in micro_batch])
    chunks = 2 * size if size > 1 else 1  # of each row
    lengths = -(-real // chunks) * chunks
    missing = -int(lengths.sum()) % math.lcm(chunks, size * multiple)
    if missing:
        lengths = torch.cat([lengths, lengths.new_tensor([missing])])
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    # Each token's position in its row, and the indices of real tokens and of tokens that predict an action.
    positions = torch.arange(int(starts[-1])) - starts[:-1].repeat_interleave(lengths)
    ends = torch.nn.functional.pad(real, (0, len(lengths) - len(real))).repeat_interleave(lengths)
    places = (positions < ends).nonzero().squeeze(1)  # of the real tokens
    ids = torch.cat([row[0] for row in micro_batch])
    actions = torch.cat([row[1] for row in micro_batch])
    labels = ids[actions]
    predicts = places[actions] - 1  # the hidden state of a token predicts the next one
    tokens = ids.new_zeros(len(positions))
    tokens[places] = ids
    routes = _packed_routes(micro_batch, places, len(positions))
    # Select this rank's chunks of every row.
    is_local = None
    if size > 1:
        local = chunks_of_rank(lengths, size, rank)
        local_place = torch.full_like(tokens, -1)
        local_place[local] = torch.arange(len(local))
        tokens, positions, predicts = tokens[local], positions[local], local_place[predicts]
        routes = None if routes is None else routes[local]
        is_local = predicts >= 0
        predicts, labels = predicts[is_local], labels[is_local]
    # Copy to the device.
    longest = int(lengths.max())
    offsets = starts.to(torch.int32).to(device, non_blocking=True)
    tokens, positions, predicts, labels = (
        tensor.to(device, non_blocking=True)
        for tensor in (tokens.unsqueeze(0), positions.unsqueeze(0), predicts, labels)
    )
    is_local, routes = (each if each is None else each.to(device, non_blocking=True) for each in (is_local, routes))
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    return Packed(tokens, positions, params, predicts, labels, is_local, routes)


def pack_shared(micro_batch: MicroBatch, device: torch.device, multiple: int = 1) -> Packed:
    """Like :func:`pack`, but computes common beginnings of rows once, and skips each row's last action and all later
    tokens. Tokens with different experts count as different."""
    rows, actions = [row[0] for row in micro_batch], [row[1] for row in micro_batch]
    assert not any(bool(acts[0]) for acts in actions), "a row's first token is an action"
    needed = [int(acts.nonzero().max()) if acts.any() else 0 for acts in actions]
    given = _routes(micro_batch)
    tree = pack_tree(rows, needed, given, multiple)
    flat = torch.cat(actions)
    labels = torch.cat(rows)[flat]
    predicts = tree.places[flat.nonzero().squeeze(1) - 1]
    routes = None
    if given is not None:
        routes = _live(given[0], len(tree.tokens))
        routes[: len(tree.origin)] = torch.cat(given)[tree.origin]
    size, longest = len(tree.tokens), int(tree.position_ids.max()) + 1
    offsets = torch.tensor([0, size], dtype=torch.int32).to(device, non_blocking=True)
    params = TreeParams("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest, tree=tree)
    tokens, positions, predicts, labels = (
        tensor.to(device, non_blocking=True)
        for tensor in (tree.tokens.unsqueeze(0), tree.position_ids.unsqueeze(0), predicts, labels)
    )
    routes = None if routes is None else routes.to(device, non_blocking=True)
    return Packed(tokens, positions, params, predicts, labels, None, routes)


def _packed_routes(micro_batch: MicroBatch, places: Tensor, size: int) -> Tensor | None:
    """The rows' experts at the ``places`` of their tokens in a sequence of ``size``; None if no row has any."""
    given = _routes(micro_batch)
    if given is None:
        return None
    routes = _live(given[0], size)
    routes[places] = torch.cat(given)
    return routes


def _routes(micro_batch: MicroBatch) -> list[Tensor] | None:
    """The experts of each row's tokens; None if no row has any."""
    known = [row[2] for row in micro_batch if len(row) > 2]
    if not known:
        return None
    return [row[2] if len(row) > 2 else _live(known[0], len(row[0])) for row in micro_batch]


def _live(like: Tensor, size: int) -> Tensor:
    """Routes of tokens that leave the choice to the routers."""
    return like.new_full((size, *like.shape[1:]), torch.iinfo(like.dtype).max)
