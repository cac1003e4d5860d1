"""Scores do not depend on the backend, the layout or the other rows of a batch, and rows keep their places.

The reference is a float64 loop over the logits of Transformers, one row at a time.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.scoring import score
from openrlhf_gtpo.scoring.inputs import RowFile, ScoreModel
from openrlhf_gtpo.scoring.score import fill_padded
from tests.support.families import make_checkpoint, ragged_rows
from tests.support.rank_pool import RankPool

VOCABULARY, TEMPERATURE = 151, 0.7
LENGTHS = [3, 1, 40, 17, 5, 2, 80, 6, 33, 9, 2, 64]

# Four ranks in all; data parallelism takes what a layout leaves.
MODELS: dict[str, dict[str, Any]] = {
    "deepspeed": {"backend": "deepspeed"},
    "TP1": {"backend": "megatron"},
    "TP2 SP": {"backend": "megatron", "layout": Layout(2, sequence_parallel=True)},
    "TP2 PP2": {"backend": "megatron", "layout": Layout(2, 2)},
    "PP4": {"backend": "megatron", "layout": Layout(1, 4)},
    "CP2": {"backend": "megatron", "layout": Layout(context_parallel_size=2)},
}


def write_rows(path: Path, rows: list[list[int]]) -> RowFile:
    path.write_text("".join(json.dumps({"id": i, "tokens": row}) + "\n" for i, row in enumerate(rows)))
    return RowFile(path, "none", VOCABULARY, 512)


def exact(
    checkpoint: Path, rows: list[list[int]], dtype: str = "float32", temperature: float = TEMPERATURE
) -> list[dict[str, list[float]]]:
    """Log-probs and entropies of tokens 2…n of every row, in float64, with the weights rounded to ``dtype``."""
    from transformers import AutoModelForCausalLM

    # Experts run in a loop: the grouped product of Transformers does not support float64.
    options = {"dtype": getattr(torch, dtype), "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, **options).double().eval()
    found = []
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0] / temperature
            log_probs, entropies = [], []
            for step, token in zip(logits[:-1], row[1:], strict=True):
                probabilities = torch.exp(step - torch.logsumexp(step, 0))
                log_probs.append(float(torch.log(probabilities[token])))
                entropies.append(float(-(probabilities * torch.log(probabilities)).sum()))
            found.append({"log_probs": log_probs, "entropies": entropies})
        return found


def scored(ranks: RankPool, model: ScoreModel, source: RowFile, target: Path) -> list[dict[str, Any]]:
    ranks.run(score.score_rank, model, source, target, 0)
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.fixture(scope="module", params=[("qwen2", "float32"), ("llama", "bfloat16")], ids=" ".join)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str, list[dict[str, list[float]]]]:
    """A checkpoint, the dtype to score it in, and its exact scores."""
    family, dtype = request.param
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family, VOCABULARY)
    return checkpoint, dtype, exact(checkpoint, ragged_rows(VOCABULARY, LENGTHS), dtype)


@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(ranks: RankPool, reference: Any, tmp_path: Path, name: str) -> None:
    checkpoint, dtype, wanted = reference
    rows = ragged_rows(VOCABULARY, LENGTHS)
    model = ScoreModel(str(checkpoint), **MODELS[name], dtype=dtype, temperature=TEMPERATURE, max_tokens=70)
    lines = scored(ranks, model, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == list(range(len(rows)))
    assert [len(line["log_probs"]) for line in lines] == [length - 1 for length in LENGTHS]
    for kind in ("log_probs", "entropies"):
        values = np.concatenate([line[kind] for line in lines])
        errors = np.abs(values - np.concatenate([row[kind] for row in wanted]))
        if dtype == "float32":
            assert errors.max() <= 1e-5
        else:
            # Random weights make sharp logits, which bfloat16 rounds coarsely: Transformers' own errors are as large.
            assert errors.mean() <= 2e-2 and errors.max() <= 0.25
        assert np.array_equal(values, values.astype(np.float32).astype(str).astype(float)), "digits beyond float32"


def test_long_inputs_keep_their_order_over_blocks_and_replicas(ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", VOCABULARY, num_hidden_layers=1)
    count = score.BLOCK_ROWS + 7
    rows = ragged_rows(VOCABULARY, [2 + i % 5 for i in range(count)])
    source = write_rows(tmp_path / "in.jsonl", rows)
    for backend in ("deepspeed", "megatron"):
        model = ScoreModel(str(checkpoint), backend, dtype="float32", max_tokens=256)
        lines = scored(ranks, model, source, tmp_path / "out.jsonl")
        assert [line["id"] for line in lines] == list(range(count))
        assert [len(line["entropies"]) for line in lines] == [len(row) - 1 for row in rows]
        for i in (3, count - 1):  # of the first block, and of the second
            log_probs = exact(checkpoint, [rows[i]], temperature=1.0)[0]["log_probs"]
            np.testing.assert_allclose(lines[i]["log_probs"], log_probs, rtol=0, atol=1e-5)


def test_experts_may_be_shared_by_replicas_that_have_fewer_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    checkpoint = make_checkpoint(tmp_path / "moe", "qwen3_moe", VOCABULARY, **experts)
    rows = ragged_rows(VOCABULARY, [30, 20, 30, 25, 30])
    source = write_rows(tmp_path / "in.jsonl", rows)
    layout = Layout(expert_model_parallel_size=2)
    model = ScoreModel(str(checkpoint), "megatron", layout, dtype="float32", temperature=TEMPERATURE, max_tokens=30)
    lines = scored(ranks, model, source, tmp_path / "out.jsonl")
    for line, wanted in zip(lines, exact(checkpoint, rows), strict=True):
        np.testing.assert_allclose(line["log_probs"], wanted["log_probs"], rtol=0, atol=1e-5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 100))
def test_padded_micro_batches_hold_like_lengths_and_fit(lengths: list[int], max_tokens: int) -> None:
    batches = fill_padded(lengths, max_tokens)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= max_tokens for batch in batches)
    ordered = [lengths[i] for batch in batches for i in batch]
    assert ordered == sorted(lengths, reverse=True)
