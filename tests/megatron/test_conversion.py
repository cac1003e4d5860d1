"""The families' tables put each tensor of a checkpoint, whole and once, into the ranks' parameters, and back."""

from types import SimpleNamespace

import pytest
import torch

from openrlhf_gtpo.megatron.families import FAMILIES, Weight
from openrlhf_gtpo.megatron.model.conversion import Stored

HEADS, GROUPS, HEAD, WIDTH, VOCABULARY, PADDED = 8, 4, 3, 12, 10, 16
ROWS = {  # of each matrix
    "qkv": (HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD),
    "gate_up": (WIDTH, WIDTH),
    "vocabulary": (VOCABULARY,),
    "plain": (WIDTH,),
}


def expected(weight: Weight, matrices: list[torch.Tensor], rank: int, ranks: int) -> torch.Tensor:
    """A rank's parameter, by a loop over its heads, or its share of each matrix."""
    if weight.rows == "qkv":
        q, k, v = (matrix.split(HEAD) for matrix in matrices)
        each, heads = HEADS // GROUPS, []
        for group in range(rank * GROUPS // ranks, (rank + 1) * GROUPS // ranks):
            heads += [*q[group * each : (group + 1) * each], k[group], v[group]]
        return torch.cat(heads)
    if weight.rows == "vocabulary":
        matrices = [torch.cat([matrices[0], matrices[0].new_zeros(PADDED - VOCABULARY, WIDTH)])]
    return torch.cat([matrix if weight.cut is None else matrix.chunk(ranks, weight.cut)[rank] for matrix in matrices])


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "weight", sorted({w for f in FAMILIES.values() for w in f.weights.values()}, key=str), ids=str
)
def test_ranks_have_their_parts_and_give_them_back(weight: Weight, ranks: int) -> None:
    is_vector = weight.names[0].endswith("bias") or "norm" in weight.names[0]
    matrices = [torch.randn(rows, *([] if is_vector else [WIDTH])) for rows in ROWS[weight.rows]]
    tensors = dict(zip(weight.names, [torch.cat(matrices)] if weight.is_stacked else matrices, strict=True))
    config = SimpleNamespace(
        tensor_model_parallel_size=ranks, num_query_groups=GROUPS, num_attention_heads=HEADS, kv_channels=HEAD
    )
    shards, read = [], dict.fromkeys(tensors, 0)
    for rank in range(ranks):
        exact = expected(weight, matrices, rank, ranks)
        stored = Stored.of(weight, weight.names, exact.shape, config, VOCABULARY)
        assert dict(zip(stored.names, stored.shapes, strict=True)) == {n: tuple(t.shape) for n, t in tensors.items()}
        shards.append(torch.zeros_like(exact))
        for name, window, view in stored.places(shards[-1], rank):
            view.copy_(tensors[name][window].unflatten(0, (view.shape[0], -1)))
            read[name] += tensors[name][window].numel()
        assert torch.equal(shards[-1], exact)
    copies = ranks if weight.cut is None else 1  # no rank reads another's part
    assert read == {name: tensor.numel() * copies for name, tensor in tensors.items()}
    full = torch.full([stored.numel], torch.nan)
    stored.collect(shards[: 1 if weight.cut is None else ranks], full)
    assert torch.equal(full, torch.cat([tensor.flatten() for tensor in tensors.values()]))
