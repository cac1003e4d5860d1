"""Exchanging gradients and weights while passes run gives every reader the same tensors as without overlap."""

from pathlib import Path

import pytest
import torch

from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support.families import SHALLOW, make_checkpoint
from tests.support.moe_program import make_mixture
from tests.support.overlap_program import with_and_without
from tests.support.rank_pool import RankPool

SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FP8 = Fp8Options("emulated", "blockwise", primary_weights=True)
# model, layout, FP8
CASES: dict[str, tuple[str, Layout, Fp8Options | None]] = {
    "TP2": ("wide", Layout(**SP), None),
    "TP2-fp8-weights": ("wide", Layout(**SP), FP8),
    "PP2-tied": ("tied", Layout(pipeline_model_parallel_size=2), None),
    "TP2xEP2": ("mixture", Layout(**SP, expert_model_parallel_size=2), None),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, wide: str) -> dict[str, str]:
    folder = tmp_path_factory.mktemp
    return {
        "tied": str(make_checkpoint(folder("tied"), "qwen2", tie_word_embeddings=True, **SHALLOW)),
        "mixture": str(make_mixture(folder("mixture"), "normalised")),
        "wide": wide,
    }


@pytest.mark.parametrize("name", CASES)
def test_every_reader_finds_the_same_weights(
    name: str, sources: dict[str, str], tmp_path: Path, ranks: RankPool
) -> None:
    model, layout, fp8 = CASES[name]
    stale = False
    for found, expected in ranks.run(with_and_without, sources[model], layout, fp8, str(tmp_path)):
        between = found.pop("between"), expected.pop("between")
        stale |= any(not torch.equal(between[0][key], value) for key, value in between[1].items())
        assert {name: set(part) for name, part in found.items()} == {
            name: set(part) for name, part in expected.items()
        }
        for reader, tensors in expected.items():
            for key, value in tensors.items():
                assert torch.equal(found[reader][key], value), (reader, key)
    assert stale, "the next step's weights should be gathered only in its forward pass"
