"""How many tokens and columns to work on at a time, given a budget in bytes.

Owns the accounting of temporaries: `backward_bytes` counts term by term what `projection` keeps alive for a tile.
Change the two together. Knows nothing about tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

# On CPU a tile that stays in the last-level cache makes the passes over the logits nearly free: each costs 0.04 to
# 0.13 ns per logit, while the product costs 3.6 ns (H = 896, bfloat16, one AVX-512 core, 32 MiB of cache). Half as
# many columns cost more calls, and twice as many cost more cache. On other devices a tile is as large as the budget
# allows, because small tiles cost kernel launches.
CPU_TILE = (1024, 2048)
DEVICE_TILE = (8192, 1 << 20)
# Matrix units and vector loads are faster if the rows of a tile begin at multiples of this many columns.
ALIGNMENT = 128
# The share of the budget that an accumulator of d_hidden may take in the backward pass; tiles get the rest.
ACCUMULATOR_SHARE = 0.75


def spans(length: int, step: int) -> Iterator[slice]:
    """Cut range(length) into slices of at most `step`."""
    for start in range(0, length, step):
        yield slice(start, min(start + step, length))


def default_budget(on_cpu: bool) -> int:
    """Default budget for temporaries, in bytes. For Qwen2.5-32B's head at TP8 and 12288 tokens, 1 GiB gives backward
    tiles of 8192 tokens and all 19072 columns in one turn; a quarter of it gives tiles of 2048 and 2304 in two."""
    return (256 if on_cpu else 1024) * 2**20


@dataclass(frozen=True)
class Tile:
    """Tokens and columns of one tile; tiles at the edges are smaller."""

    tokens: int
    columns: int


def portable_bytes_per_logit(item: int, wide: int, second: bool) -> int:
    """Bytes per logit in torch: the product if it is narrower than the arithmetic, z, and 2**z if `second`."""
    return (item if item != wide else 0) + wide + (wide if second else 0)


def fused_bytes_per_logit(item: int, wide: int, second: bool) -> int:
    """Bytes per logit in Triton: the product."""
    return item


def backward_bytes(
    tokens: int,
    columns: int,
    *,
    per_logit: int,
    width: int,
    item: int,
    wide: int,
    adds_in_place: bool,
    direct_from: int | None,
) -> int:
    """Count the bytes alive for one backward tile of hidden width `width`; the implementation takes `per_logit` bytes
    for each logit.

    If the inputs (`item` bytes per element) are narrower than the arithmetic (`wide`), the weight has an accumulator.
    Unless products are added to a wide matrix in place, each partial gradient then exists twice more during the
    addition: as the product in the input dtype, and widened. A tile of all `direct_from` tokens needs no accumulator
    of the weight, because its product is written straight into the gradient.
    """
    logits = tokens * columns * per_logit
    if item == wide:
        return logits
    partial_products = 0 if adds_in_place else width * max(tokens, columns) * (item + wide)
    accumulator = 0 if direct_from is not None and tokens >= direct_from else width * columns * wide
    return logits + partial_products + accumulator


def choose_tile(tokens: int, columns: int, budget: int, on_cpu: bool, tile_bytes: Callable[[int, int], int]) -> Tile:
    """Choose the largest tile within `budget` bytes: start from the device's best size and halve the longer side.

    Raises:
        ValueError: a single logit does not fit.
    """
    most_tokens, most_columns = CPU_TILE if on_cpu else DEVICE_TILE
    t, v = max(1, min(tokens, most_tokens)), max(1, min(columns, most_columns))
    while tile_bytes(t, v) > budget:
        if t == v == 1:
            raise ValueError(
                f"chunk_bytes leaves {budget} bytes for a tile, but the smallest needs {tile_bytes(1, 1)}; raise it"
            )
        t, v = (t, (v + 1) // 2) if v >= t else ((t + 1) // 2, v)
    if ALIGNMENT < v < columns:
        v -= v % ALIGNMENT
    return Tile(t, v)


def backward_peak(tokens: int, columns: int, width: int, *, budget: int, on_cpu: bool, is_frozen: bool = False) -> int:
    """Count the peak bytes of temporaries in a backward pass: the tiles and the accumulator of d_hidden (see
    `projection`). Inputs are bfloat16, the entropy has no gradient, and the weight's gradient is added to a float32
    buffer.

    Args:
        tokens, columns, width: T, V_local and H.
        budget: `chunk_bytes`.
        on_cpu: True for the portable implementation, False for Triton's.
        is_frozen: the weight has no gradient.
    """
    item, wide = 2, 4
    per_logit = (portable_bytes_per_logit if on_cpu else fused_bytes_per_logit)(item, wide, False)
    fits = int(budget * ACCUMULATOR_SHARE) // (width * wide)
    tokens = min(tokens, max(1, fits))
    accumulator = tokens * width * wide

    def tile_bytes(t: int, v: int) -> int:
        return backward_bytes(
            t, v, per_logit=per_logit, width=width, item=item, wide=wide, adds_in_place=not on_cpu, direct_from=None
        )

    tile = choose_tile(tokens, columns, budget - accumulator, on_cpu, tile_bytes)
    # The budget includes an accumulator of the weight's gradient, which a float32 buffer makes unnecessary, and room
    # for the larger of two partial gradients.
    missing = width * tile.columns * wide
    if is_frozen and on_cpu:
        missing += width * max(0, tile.columns - tile.tokens) * (item + wide)
    return accumulator + tile_bytes(tile.tokens, tile.columns) - missing
