"""Bytes of activations that one decoder layer keeps for the backward pass, a token of a micro-batch on one rank.

Two kinds of layers, which keep different things:

- ``local``: the layers of ``megatron/model/layers.py``, which run where Transformer Engine is not installed. What autograd
  keeps of them was listed operation by operation, and a test holds it to what is measured.
- ``te``: Transformer Engine's fused modules on a CUDA device. From their sources (2.9 to 2.11), not measured.

All in bfloat16, with H the hidden size, Q the columns of all query heads, K those of all key (and as many of all value)
heads, D a head's, I the MLP's, t the tensor-parallel size, and s = 1/t under sequence parallelism, else 1.
"""

from dataclasses import dataclass

from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.model_shape import ModelShape

RECOMPUTE = ("none", "selective", "full")
# Sequences shorter than this are attended to in float32 on a CPU; ``megatron.layers`` says why.
SHORT_ROW = 384


@dataclass(frozen=True)
class LayerSetting:
    """What decides how much a layer keeps.

    Fields:
        tensor: TP size.
        sequence_parallel: activations between the matrices are shards too.
        kind: ``te`` or ``local``.
        fp8: products in FP8, whose inputs are then kept in one byte; None for bfloat16.
        short_rows: sequences are below :data:`SHORT_ROW` tokens; counts for ``local`` alone.
    """

    tensor: int = 1
    sequence_parallel: bool = False
    kind: str = "te"
    fp8: Fp8Options | None = None
    short_rows: bool = False

    @property
    def spread(self) -> float:
        """s above."""
        return 1 / self.tensor if self.sequence_parallel else 1.0

    @property
    def input_bytes(self) -> float:
        """Of one element of a product's input that is kept: with a float32 scale for each 128 where scales are of blocks."""
        if self.fp8 is None or self.fp8.emulated:
            return 2.0
        return 1 + 4 / 128 if self.fp8.recipe == "blockwise" else 1.0


def layer_bytes(shape: ModelShape, setting: LayerSetting, recompute: str) -> float:
    """Kept of one layer, by one token.

    Args:
        recompute: with ``full`` the layer's input alone; with ``selective`` attention's inputs, not its result.
    """
    if recompute == "full":
        return 2 * shape.hidden_size * setting.spread
    return _norms(shape, setting) + _attention(shape, setting, recompute == "selective") + _mlp(shape, setting)


def _norms(shape: ModelShape, setting: LayerSetting) -> float:
    """The two norms of a layer, each with the input of the product that follows."""
    hidden, reciprocal = float(shape.hidden_size), 4.0
    if setting.kind == "local":  # the input in float32, normalised in bfloat16, and scaled for the product
        each = 4 * hidden + 2 * hidden + 2 * hidden
    else:  # the input, and normalised
        each = 2 * hidden + setting.input_bytes * hidden
    return 2 * (each + reciprocal) * setting.spread


def _attention(shape: ModelShape, setting: LayerSetting, recomputed: bool) -> float:
    """Between the two products of attention, the input of the second included."""
    query, key = shape.query_width, shape.key_value_width
    heads, groups = shape.num_attention_heads, shape.num_key_value_heads
    # Rotated query and key, and the first product's result, of which value is a part.
    inputs = 2 * (query + 2 * key) + 2 * query + 2 * key
    logsumexp = 4 * heads
    if setting.kind == "te":
        result = 2 * query  # which is the second product's input too, except in FP8
        quantised = 0.0 if setting.fp8 is None or setting.fp8.emulated else setting.input_bytes * query
        kept = inputs + result + quantised + (0 if recomputed else logsumexp)
        normed = 2 * query + 2 * key
        angles = 0.0
    else:
        joined = 2 * query
        if recomputed:
            kept = inputs + joined
        elif setting.short_rows:  # copies in float32 replace the inputs
            kept = 4 * (query + 2 * key) + 4 * query + logsumexp + joined
        else:
            kept = inputs + 2 * query + logsumexp + joined
        normed = 6 * (query + key) + 4 * (heads + groups)
        angles = 8.0 * shape.head_dim  # cosines and sines, for query and for key, on every rank
    return (kept + (normed if shape.qk_norm else 0)) / setting.tensor + angles


def _mlp(shape: ModelShape, setting: LayerSetting) -> float:
    """Between the two products, the input of the second included: 4I and 2I, and the local layers' two factors."""
    inside = shape.intermediate_size / setting.tensor
    kept = (10 if setting.kind == "local" else 4 + setting.input_bytes) * inside
    if not shape.num_experts:
        return kept
    # A token's copies, as they arrive at the experts and as they come back, and the router's scores in float32.
    copies = shape.experts_per_token * (kept + 4 * shape.hidden_size)
    return copies + 8 * shape.num_experts
