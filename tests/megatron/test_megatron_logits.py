"""A checkpoint's weights, shards, rotary base, norms, biases, packed rows and vocabulary match Transformers, as the
logits and the full tensors sent to vLLM show.
"""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.support.families import SHALLOW, make_checkpoint, ragged_rows
from tests.support.logits_program import full_weights, logits, logits_of_hub, several
from tests.support.rank_pool import RankPool

LAYOUTS = {
    "TP1": Layout(),
    "TP2": Layout(tensor_model_parallel_size=2),
    "TP2-SP": Layout(tensor_model_parallel_size=2, sequence_parallel=True),
    "TP4": Layout(tensor_model_parallel_size=4),
    "TP4-SP": Layout(tensor_model_parallel_size=4, sequence_parallel=True),
    "PP2": Layout(pipeline_model_parallel_size=2),
    "TP2xPP2": Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2),
    "TP2xPP2-SP": Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True),
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
# The second vocabulary leaves 384 of 512 columns, as 151936 does. Three models have two layers per stage at PP2.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 151, SHALLOW),
    "llama-tied": ("llama", 896, SHALLOW | {"tie_word_embeddings": True}),
    "llama-3-rope": ("llama", 151, SHALLOW | {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", 896, SHALLOW | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2": ("qwen2", 896, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", 151, SHALLOW | {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", 151, {}),
    "qwen3-tied": ("qwen3", 896, SHALLOW | {"tie_word_embeddings": True}),
    "phi3": ("phi3", 151, SHALLOW | {"rope_parameters": PARTIAL_ROPE}),
    "smollm3": ("smollm3", 896, {"tie_word_embeddings": True, "no_rope_layers": [1, 0, 0, 1]}),
}
MICRO_BATCHES = [[5, 1, 17, 9], [30], [3, 11]]
BUCKETS = [1, 30_000, 2**30]  # bytes: one parameter per bucket, several, a whole stage


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list, list]]:
    """Each model's checkpoint, micro-batches, and Transformers' logits for them, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    made = {}
    for name, (family, vocab_size, fields) in MODELS.items():
        source = make_checkpoint(tmp_path_factory.mktemp(name), family, vocab_size, **fields)
        micro_batches = [ragged_rows(vocab_size, lengths, seed=i) for i, lengths in enumerate(MICRO_BATCHES)]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.no_grad():
            exact = [torch.cat([model(torch.tensor([row])).logits[0] for row in rows]) for rows in micro_batches]
        made[name] = source, micro_batches, exact
    return made


@pytest.fixture(scope="module", params=LAYOUTS)
def found(request: pytest.FixtureRequest, checkpoints: dict, ranks: RankPool) -> tuple[Layout, dict[str, list[tuple]]]:
    """A layout, and every rank's (logits, full weights) of its models: one at every layout, the others only where most
    is sharded at once."""
    layout = LAYOUTS[request.param]
    models = list(MODELS) if request.param in ("TP4-SP", "TP2xPP2-SP") else ["llama"]
    calls: list[tuple] = []
    for name in models:
        source, micro_batches, _ = checkpoints[name]
        calls.append((logits, (str(source), layout, micro_batches)))
        calls.append((full_weights, (str(source), layout, "bfloat16", BUCKETS)))
    answers = ranks.run(several, layout, calls)
    return layout, {name: [rank[2 * i : 2 * i + 2] for rank in answers] for i, name in enumerate(models)}


def test_logits_are_those_of_transformers(found: tuple, checkpoints: dict) -> None:
    layout, models = found
    for name, ranks_of_model in models.items():
        answers = [of_logits for of_logits, _ in ranks_of_model if of_logits]
        assert len(answers) == 4 // layout.model_parallel_size  # each replica has its own
        for answer in answers:
            for logits_found, exact in zip(answer, checkpoints[name][2], strict=True):
                assert np.abs(logits_found - exact.numpy()).max() <= 1e-4, name


def test_every_rank_gets_the_checkpoint(found: tuple, checkpoints: dict) -> None:
    """What is sent to vLLM has the right names, shapes and order, whatever the size of buckets."""
    for name, ranks_of_model in found[1].items():
        exact = load_file(checkpoints[name][0] / "model.safetensors")
        for _, weights in ranks_of_model:
            assert set(weights) == set(exact), name
            for key, value in exact.items():
                assert np.array_equal(weights[key], value.to(torch.bfloat16).float().numpy()), (name, key)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "lacks model.norm.weight"),
        (
            lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"][1:]}),
            "lm_head.weight has the shape (150, 64) in model.safetensors, and config.json says (151, 64)",
        ),
    ],
)
def test_weights_of_another_model(
    change: Callable, message: str, checkpoints: dict, tmp_path: Path, one_rank: RankPool
) -> None:
    shutil.copytree(checkpoints["llama"][0], tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(AssertionError, match=re.escape(message)):
        one_rank.run(logits, str(tmp_path), Layout(), [[[1, 2]]])


def test_a_model_of_the_hub_is_loaded_by_its_name(checkpoints: dict, ranks: RankPool) -> None:
    source, micro_batches, exact = checkpoints["llama"]
    call = (logits_of_hub, ("someone/something", str(source), LAYOUTS["TP4"], micro_batches))
    [found] = [rank[0] for rank in ranks.run(several, LAYOUTS["TP4"], [call]) if rank[0]]
    for ours, theirs in zip(found, exact, strict=True):
        assert np.abs(ours - theirs.numpy()).max() <= 1e-4
