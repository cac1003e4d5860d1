"""Would catch a parameter that reaches vLLM under a wrong name, in a wrong shape, merged in a wrong order, or not at all."""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_checkpoint
from logits_program import full_weights
from rank_pool import RankPool
from test_megatron_logits import CASES, LAYOUTS, MODELS

BUCKETS = [1, 30_000, 2**30]  # bytes: a parameter each, some of a stage, a stage


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, vocab_size, fields = MODELS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp(request.param), family, vocab_size, **fields)


@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_every_rank_gets_the_checkpoint(checkpoint: Path, name: str, ranks: RankPool) -> None:
    from safetensors.torch import load_file

    exact = load_file(checkpoint / "model.safetensors")
    for found in ranks.run(full_weights, str(checkpoint), LAYOUTS[name], "bfloat16", BUCKETS):
        assert set(found) == set(exact)
        for key, value in exact.items():
            assert np.array_equal(found[key], value.to(torch.bfloat16).float().numpy()), key
