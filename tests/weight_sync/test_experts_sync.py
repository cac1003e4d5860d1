"""Catches an engine whose experts are not what was sent. vLLM packs them for its kernels, on CPU at the first load
alone: checksums are of what it loaded, and say nothing of what it computes with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.synced_engine import Synced, save_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


def answers(synced: Synced) -> list[list[int]]:
    """Greedy answers to four prompts."""
    import ray
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = ray.get([synced.engine.generate.remote(row.tolist(), params) for row in synced.tokens])
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_experts_that_are_sent_are_those_that_the_engine_computes_with(bundle: Any, tmp_path: Path) -> None:
    import ray
    from safetensors.torch import load_file

    checkpoint = save_checkpoint(tmp_path, experts=8)
    synced = Synced(checkpoint, bundle, 1, 1.0)
    loaded = answers(synced)
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(2)
    others = {
        name: w + w.float().std() * torch.randn(w.shape, generator=generator) if "experts" in name else w
        for name, w in weights.items()
    }
    for transport in ("broadcast", "colocated", "broadcast"):
        synced.send(weights, 20_000, transport)
        assert answers(synced) == loaded, transport
        synced.send(others, 2**28, transport)
        assert answers(synced) != loaded, transport
    save_checkpoint_of(others, checkpoint)
    changed = answers(synced)
    ray.kill(synced.engine)
    again = Synced(checkpoint, bundle, 1, 1.0)
    assert answers(again) == changed
    ray.kill(again.engine)


def save_checkpoint_of(weights: dict[str, torch.Tensor], checkpoint: Path) -> None:
    from safetensors.torch import save_file

    save_file({name: w.bfloat16() for name, w in weights.items()}, checkpoint / "model.safetensors", {"format": "pt"})
