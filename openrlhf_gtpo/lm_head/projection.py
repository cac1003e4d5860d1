"""The forward and the backward pass over one shard of the vocabulary, tile by tile, and the exchange between shards.

Owns the settings of a call, the plan of the backward pass (the sweeps over the logits that keep it within the budget),
the loops, the products and the sums of gradients. Between the products, a `TileWork` handles a tile of logits:
`portable` in torch, `kernels` in Triton. Knows nothing about autograd.

Products are computed in the inputs' dtype and everything after them in `accumulation_dtype`. Tiling follows Flash
Attention (arXiv 2205.14135) and Cut Cross-Entropy (arXiv 2411.09009).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from . import tiles
from .shard import VocabularyShard
from .softmax import LogitGradient, TokenStatistics, accumulation_dtype
from .tiles import spans


class TileWork(Protocol):
    """An implementation's memory for one tile, reused by all tiles of a sweep, and its operations on the logits there.

    A tile is (t, v). Its labels (t,) are columns of the tile; labels outside [0, v) are not in the tile. The bias (v,)
    is in the accumulation dtype.
    """

    def __init__(self, tile: tiles.Tile, like: Tensor, second: bool) -> None:
        """`like` has the dtype and device of the inputs; `second`: whether an entropy or its gradient is needed."""

    @staticmethod
    def bytes_per_logit(item: int, wide: int, second: bool) -> int:
        """Return this memory's bytes per logit; `item` and `wide` are the element sizes of inputs and accumulators."""

    def product(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Compute hidden (t, H) x weight (v, H) in the dtype of the inputs; overwrites the previous contents."""

    @classmethod
    def statistics(cls, logits: Tensor, labels: Tensor, bits_per_logit: float) -> TokenStatistics:
        """Compute statistics of existing logits (T, V) without modifying them; a column of -inf has probability 0."""

    def absorb(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, total: TokenStatistics, bits_per_logit: float
    ) -> None:
        """Add the columns of the tile to `total`."""

    def gradient(
        self, product: Tensor, bias: Tensor | None, labels: Tensor, logit_grad: LogitGradient, bias_sum: Tensor | None
    ) -> Tensor:
        """Compute the gradient of the logits in the product's memory, in the dtype of the inputs, and add its sum over
        the tokens to `bias_sum` (v,)."""


@dataclass(frozen=True)
class Settings:
    """The non-tensor arguments of one call; `linear_log_prob_and_entropy` explains them."""

    temperature: float
    shard: VocabularyShard
    chunk_bytes: int
    with_entropy: bool
    accumulate_into_main_grad: bool
    work: type[TileWork]

    @property
    def accumulator_bytes(self) -> int:
        """Maximum bytes of an accumulator of d_hidden."""
        return int(self.chunk_bytes * tiles.ACCUMULATOR_SHARE)

    def forward_tile(self, hidden: Tensor) -> tiles.Tile:
        per_logit = self.work.bytes_per_logit(*_item_sizes(hidden), self.with_entropy)
        on_cpu = hidden.device.type == "cpu"
        columns = self.shard.columns
        return tiles.choose_tile(hidden.size(0), columns, self.chunk_bytes, on_cpu, lambda t, v: t * v * per_logit)

    def backward_tile(
        self, hidden: Tensor, tokens: int, accumulator_bytes: int, *, entropy_grad: bool, direct: bool
    ) -> tiles.Tile:
        """Choose the backward tile. `direct`: the weight's gradient has the inputs' dtype and is still empty."""
        item, wide = _item_sizes(hidden)
        on_cpu = hidden.device.type == "cpu"
        needed = partial(
            tiles.backward_bytes,
            per_logit=self.work.bytes_per_logit(item, wide, entropy_grad),
            width=hidden.size(1),
            item=item,
            wide=wide,
            adds_in_place=not on_cpu,
            direct_from=tokens if direct else None,
        )
        return tiles.choose_tile(tokens, self.shard.columns, self.chunk_bytes - accumulator_bytes, on_cpu, needed)

    def check_budget(self, hidden: Tensor) -> None:
        """Raise ValueError if no tile would fit, already in the forward pass and on every rank."""
        self.forward_tile(hidden)
        self.backward_tile(hidden, hidden.size(0), self.accumulator_bytes, entropy_grad=True, direct=False)


def _item_sizes(hidden: Tensor) -> tuple[int, int]:
    return hidden.element_size(), accumulation_dtype(hidden.dtype).itemsize


def forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Compute log_prob (T,), entropy (T,) or None, and the normalizer (T,) that the backward pass needs.

    `hidden` (T, H), `weight` (V_local, H), `bias` (V_local,). `labels` (T,) are local: one outside [0, columns)
    belongs to another shard.
    """
    shard, bits_per_logit = settings.shard, 1 / (math.log(2) * settings.temperature)
    tile, wide = settings.forward_tile(hidden), accumulation_dtype(hidden.dtype)
    memory = settings.work(tile, hidden, settings.with_entropy)
    bias = None if bias is None else bias.to(wide)
    total = TokenStatistics.empty(hidden.size(0), wide, hidden.device, settings.with_entropy)
    for tokens in spans(hidden.size(0), tile.tokens):
        for columns in spans(shard.columns, tile.columns):
            product = memory.product(hidden[tokens], weight[columns])
            tile_bias = None if bias is None else bias[columns]
            memory.absorb(product, tile_bias, labels[tokens] - columns.start, total.rows(tokens), bits_per_logit)
    total = shard.merged(total, bits_per_logit)
    entropy = total.entropy(shard.vocab_size) if settings.with_entropy else None
    return total.log_prob(settings.temperature), entropy, total.normalizer(bits_per_logit)


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    gradient: LogitGradient,
    settings: Settings,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute gradients of hidden (T, H), weight (V_local, H) and bias (V_local,), each None where `needs` is
    False."""
    needs_hidden, needs_weight, needs_bias = needs
    shard, wide = settings.shard, gradient.normalizer.dtype
    d_hidden = torch.empty_like(hidden) if needs_hidden else None
    d_bias = torch.zeros(weight.size(0), dtype=wide, device=weight.device) if needs_bias else None
    into_main_grad = needs_weight and settings.accumulate_into_main_grad
    d_weight: Tensor | None = None
    if needs_weight:
        d_weight = weight.main_grad if into_main_grad else torch.empty_like(weight)  # type: ignore[attr-defined]
    d_weight_is_fresh = not into_main_grad

    for part in plan_sweeps(hidden, d_weight, needs_hidden, settings):
        # An accumulator of d_hidden (d_hidden itself if it is wide enough), and the tile that it leaves room for.
        tokens = part.tokens
        in_place = hidden.dtype == wide
        hidden_sum: Tensor | None = None
        if d_hidden is not None and part.adds_hidden:
            place = d_hidden[tokens]
            hidden_sum = place.zero_() if in_place else torch.zeros(place.shape, dtype=wide, device=place.device)
        accumulated = 0 if hidden_sum is None or in_place else hidden_sum.nbytes
        tile = settings.backward_tile(
            hidden,
            tokens.stop - tokens.start,
            accumulated,
            entropy_grad=gradient.slope is not None,
            direct=d_weight_is_fresh and d_weight is not None and d_weight.dtype == hidden.dtype,
        )
        sweep(
            settings.work,
            hidden[tokens],
            weight[: shard.columns],
            None if bias is None else bias[: shard.columns],
            labels[tokens],
            gradient.rows(tokens),
            tile,
            d_hidden=hidden_sum,
            d_weight=None if d_weight is None or not part.adds_weight else d_weight[: shard.columns],
            d_bias=None if d_bias is None or not part.adds_weight else d_bias[: shard.columns],
            d_weight_is_fresh=d_weight_is_fresh,
        )
        # Sum d_hidden over the shards, and round it.
        d_weight_is_fresh = d_weight_is_fresh and not part.adds_weight
        if d_hidden is not None and hidden_sum is not None:
            shard.sum_(hidden_sum)
            if not in_place:
                d_hidden[tokens].copy_(hidden_sum)
        del hidden_sum  # before the next turn allocates its own

    # Padding columns, and a weight that no sweep has written, have no gradient.
    if d_weight is not None and not into_main_grad:
        d_weight[0 if d_weight_is_fresh else shard.columns :].zero_()
    if into_main_grad:
        d_weight = _mark_added_to_main_grad(weight)
    return d_hidden, d_weight, None if d_bias is None or bias is None else d_bias.to(bias.dtype)


class Sweep(NamedTuple):
    """One pass over the logits of some tokens, and the gradients that it computes: d_hidden, weight's and bias's."""

    tokens: slice
    adds_hidden: bool
    adds_weight: bool


def plan_sweeps(hidden: Tensor, d_weight: Tensor | None, needs_hidden: bool, settings: Settings) -> list[Sweep]:
    """Plan the passes over the logits that the backward pass makes.

    One pass, with a float32 accumulator of d_hidden (T, H), is enough if that leaves room for tiles (T * H <= 50 M at
    a budget of 256 MiB). Beyond that, tokens are processed in turns if d_weight is float32 and can accumulate
    (Megatron's main gradient). Otherwise, rounding it after each turn would lose the precision of float32 sums. Then
    d_hidden has passes of its own and d_weight has one: five products instead of four, and still exact.

    All ranks of a group get the same plan, because its inputs are the same on all of them.
    """
    tokens, width = hidden.shape
    wide = accumulation_dtype(hidden.dtype)
    everything = slice(0, tokens)
    if tokens == 0:
        return []
    fits = settings.accumulator_bytes // (width * wide.itemsize)
    if not needs_hidden or hidden.dtype == wide or tokens <= fits:
        return [Sweep(everything, needs_hidden, True)]
    turns_add_weight = d_weight is None or d_weight.dtype == wide
    sweeps = [Sweep(turn, True, turns_add_weight) for turn in spans(tokens, fits)]
    return sweeps if turns_add_weight else [*sweeps, Sweep(everything, False, True)]


def sweep(
    work: type[TileWork],
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    gradient: LogitGradient,
    tile: tiles.Tile,
    *,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
    d_weight_is_fresh: bool,
) -> None:
    """Recompute every logit of `hidden` (T, H) x `weight` (V, H) and add its part to the gradients, each None if not
    needed.

    `d_hidden` (T, H) and `d_bias` (V,), both in the accumulation dtype, are added to. `d_weight` (V, H), of any dtype,
    is added to, or overwritten if `d_weight_is_fresh` (its previous contents are then undefined).

    Columns are the outer loop, so that each tile of the weight's gradient is completed, and converted from the
    accumulation dtype, only once.
    """
    wide = accumulation_dtype(hidden.dtype)
    memory = work(tile, hidden, gradient.slope is not None)
    bias = None if bias is None else bias.to(wide)
    # If a tile of the weight's gradient is a single product, write the product straight into `d_weight`.
    direct = d_weight is not None and d_weight_is_fresh and d_weight.dtype == hidden.dtype
    direct = direct and tile.tokens >= hidden.size(0)
    for columns in spans(weight.size(0), tile.columns):
        weight_tile = weight[columns]
        place = None if d_weight is None else d_weight[columns]
        # The accumulator of this tile's weight gradient: the gradient itself if it is wide enough.
        weight_sum: Tensor | None = None
        if place is not None and not direct:
            weight_sum = place if place.dtype == wide else torch.empty(place.shape, dtype=wide, device=place.device)
            if d_weight_is_fresh or weight_sum is not place:
                weight_sum.zero_()
        # Recompute the logits, turn them into their gradient, and multiply it with both factors.
        for tokens in spans(hidden.size(0), tile.tokens):
            grad = memory.gradient(
                memory.product(hidden[tokens], weight_tile),
                None if bias is None else bias[columns],
                labels[tokens] - columns.start,
                gradient.rows(tokens),
                None if d_bias is None else d_bias[columns],
            )
            if d_hidden is not None:
                add_product_(d_hidden[tokens], grad, weight_tile)
            if weight_sum is not None:
                add_product_(weight_sum, grad.t(), hidden[tokens])
            elif place is not None:
                torch.mm(grad.t(), hidden[tokens], out=place)
        if place is not None and weight_sum is not None and weight_sum is not place:
            if d_weight_is_fresh:
                place.copy_(weight_sum)
            else:
                place.add_(weight_sum)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Compute total += left @ right, where `total` may be wider than the factors."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:  # cuBLAS adds to a wider matrix without a separate partial product
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.add_(torch.mm(left, right))


def _mark_added_to_main_grad(weight: Tensor) -> Tensor | None:
    """Mark the gradient as added to `main_grad`, and return megatron-core's dummy, which keeps its DDP hooks running.

    See `LinearWithGradAccumulationAndAsyncCommunication.backward` in megatron/core/tensor_parallel/layers.py: a dummy
    keeps the backward hooks on the main thread; its contents are ignored unless `zero_out_wgrad` asks for zeros.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)
