"""Would catch scores that depend on the backend, the layout or the company a row has, and rows that change places.

The reference is a float64 loop over the logits of Transformers, one row at a time.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import make_checkpoint, ragged_rows
from rank_pool import RankPool

from openrlhf_gtpo.integration import score
from openrlhf_gtpo.integration.score_models import ScoreModel, fill_padded
from openrlhf_gtpo.integration.score_rows import RowFile
from openrlhf_gtpo.megatron.layout import Layout

VOCABULARY, TEMPERATURE = 151, 0.7
LENGTHS = [3, 1, 40, 17, 5, 2, 80, 6, 33, 9, 2, 64]

# Four ranks in all: what a layout leaves is data parallelism.
MODELS: dict[str, dict[str, Any]] = {
    "deepspeed": {"backend": "deepspeed"},
    "TP1": {"backend": "megatron"},
    "TP2 SP": {"backend": "megatron", "layout": Layout(2, sequence_parallel=True)},
    "TP2 PP2": {"backend": "megatron", "layout": Layout(2, 2)},
    "PP4": {"backend": "megatron", "layout": Layout(1, 4)},
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / request.param, request.param, VOCABULARY)


def write_rows(path: Path, rows: list[list[int]]) -> RowFile:
    path.write_text("".join(json.dumps({"id": i, "tokens": row}) + "\n" for i, row in enumerate(rows)))
    return RowFile(path, "none", VOCABULARY, 512)


def exact(checkpoint: Path, rows: list[list[int]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Log-probs and entropies of tokens 2…n of every row."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64).eval()
    found = []
    with torch.no_grad():
        for row in rows:
            logits = model(torch.tensor([row])).logits[0].double() / TEMPERATURE
            log_probs, entropies = [], []
            for step, token in zip(logits[:-1], row[1:], strict=True):
                probabilities = torch.exp(step - torch.logsumexp(step, 0))
                log_probs.append(float(torch.log(probabilities[token])))
                entropies.append(float(-(probabilities * torch.log(probabilities)).sum()))
            found.append((np.array(log_probs), np.array(entropies)))
    return found


def scored(ranks: RankPool, model: ScoreModel, source: RowFile, target: Path) -> list[dict[str, Any]]:
    ranks.run(score.score_rank, model, source, target, 0)
    return [json.loads(line) for line in target.read_text().splitlines()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_those_of_transformers(
    ranks: RankPool, checkpoint: Path, tmp_path: Path, name: str, dtype: str
) -> None:
    rows = ragged_rows(VOCABULARY, LENGTHS)
    model = ScoreModel(str(checkpoint), **MODELS[name], dtype=dtype, temperature=TEMPERATURE, max_tokens=70)
    lines = scored(ranks, model, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == list(range(len(rows)))
    bound = 1e-5 if dtype == "float32" else BFLOAT16_BOUND
    for line, (log_probs, entropies) in zip(lines, exact(checkpoint, rows), strict=True):
        np.testing.assert_allclose(line["log_probs"], log_probs, rtol=0, atol=bound)
        np.testing.assert_allclose(line["entropies"], entropies, rtol=0, atol=bound)
