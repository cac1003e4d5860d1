"""Would catch a weight in the wrong place or shard, a wrong rotary base, a norm or bias that is left out, a sequence
that sees its neighbour in the pack, and a vocabulary column that does not exist.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from families import make_checkpoint, ragged_rows
from logits_program import logits
from rank_pool import RankPool

from openrlhf_gtpo.megatron.parallel.layout import Layout

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
# The second vocabulary leaves 384 of 512 columns, as 151936 does.
MODELS = {
    "llama": ("llama", 151, {}),
    "llama-tied": ("llama", 896, {"tie_word_embeddings": True}),
    "llama-3-rope": ("llama", 151, {"rope_parameters": LLAMA3_ROPE}),
    "mistral": ("mistral", 896, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2": ("qwen2", 896, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", 151, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", 151, {}),
    "qwen3-tied": ("qwen3", 896, {"tie_word_embeddings": True}),
}
# Every layout with one model, the others where most is cut at once.
CASES = [("llama", name) for name in LAYOUTS]
CASES += [(model, name) for model in MODELS if model != "llama" for name in ("TP4-SP", "TP2xPP2-SP")]
MICRO_BATCHES = [[5, 1, 17, 9], [30], [3, 11]]


@pytest.fixture(scope="module")
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list, list]:
    """A checkpoint, its micro-batches, and Transformers' logits for them, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    family, vocab_size, fields = MODELS[request.param]
    source = make_checkpoint(tmp_path_factory.mktemp(request.param), family, vocab_size, **fields)
    micro_batches = [ragged_rows(vocab_size, lengths, seed=i) for i, lengths in enumerate(MICRO_BATCHES)]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [torch.cat([model(torch.tensor([row])).logits[0] for row in rows]) for rows in micro_batches]
    return source, micro_batches, expected


@pytest.mark.parametrize(("checkpoint", "name"), CASES, indirect=["checkpoint"])
def test_logits_are_those_of_transformers(checkpoint: tuple, name: str, ranks: RankPool) -> None:
    source, micro_batches, expected = checkpoint
    answers = [answer for answer in ranks.run(logits, str(source), LAYOUTS[name], micro_batches) if answer]
    assert len(answers) == 4 // LAYOUTS[name].model_parallel_size  # each replica has its own
    for answer in answers:
        for found, exact in zip(answer, expected, strict=True):
            assert np.abs(found - exact.numpy()).max() <= 1e-4
