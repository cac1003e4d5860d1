"""How many tokens and columns are worked on at a time, given a budget of bytes.

Owns the accounting of temporaries: `forward_bytes` and `backward_bytes` say what `portable` keeps alive for one tile,
term by term, and must be changed together with it. Knows no tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass

# On CPU a tile that stays in the last-level cache makes the passes over the logits nearly free: each then costs 0.04 to
# 0.13 ns a logit, where the product costs 3.6 ns (H = 896, bfloat16, one AVX-512 core, 32 MiB of cache). Half as many
# columns cost more calls and twice as many more cache. Elsewhere a tile is as large as the budget allows, because there
# a small one costs kernel launches.
CPU_TILE = (1024, 2048)
DEVICE_TILE = (8192, 1 << 20)


@dataclass(frozen=True)
class Tile:
    """Tokens and columns of one tile; tiles at the edges are smaller."""

    tokens: int
    columns: int


def forward_bytes(tokens: int, columns: int, *, item: int, wide: int, with_entropy: bool) -> int:
    """Bytes alive for one forward tile: the product (if it is narrower than the arithmetic), z, and 2**z beside it.

    `item` is the size of an input element, `wide` that of the accumulation dtype.
    """
    product = item if item != wide else 0
    return tokens * columns * (product + wide + (wide if with_entropy else 0))


def backward_bytes(tokens: int, columns: int, width: int, *, item: int, wide: int, entropy_grad: bool) -> int:
    """Bytes alive for one backward tile of hidden width `width`.

    Where the inputs are narrower than the arithmetic, each partial gradient exists three times while it is added: as
    the product in the input dtype, widened by the addition, and (for the weight) as the accumulator of the tile.
    """
    logits = forward_bytes(tokens, columns, item=item, wide=wide, with_entropy=entropy_grad)
    if item == wide:
        return logits
    return logits + width * max(tokens * (item + wide), columns * (item + wide)) + width * columns * wide


def choose_tile(tokens: int, columns: int, budget: int, on_cpu: bool, tile_bytes: Callable[[int, int], int]) -> Tile:
    """The largest tile within `budget` bytes, starting from what suits the device and halving the longer side.

    Raises:
        ValueError: a single logit does not fit.
    """
    most_tokens, most_columns = CPU_TILE if on_cpu else DEVICE_TILE
    t, v = max(1, min(tokens, most_tokens)), max(1, min(columns, most_columns))
    while tile_bytes(t, v) > budget:
        if t == v == 1:
            raise ValueError(
                f"chunk_bytes leaves {budget} bytes for a tile, and the smallest needs {tile_bytes(1, 1)}"
            )
        t, v = (t, (v + 1) // 2) if v >= t else ((t + 1) // 2, v)
    return Tile(t, v)
