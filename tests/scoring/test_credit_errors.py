"""``benchmark fp8``: rows are compared with themselves, groups and rewards reach the credit, and every recipe differs
from BF16.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import credit_errors
from benchmarks.suite.credit_errors import compare, read_credit
from openrlhf_gtpo.algorithms import GRPOSConfig, GTPOConfig
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.scoring import score
from openrlhf_gtpo.scoring.inputs import ScoreModel
from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit
from tests.support.rank_pool import RankPool

LENGTHS = [5, 9, 4, 12, 7, 6]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "rows.jsonl"
    with path.open("w") as file:
        for i, length in enumerate(LENGTHS):
            tokens = torch.randint(16, (length,), generator=generator).tolist()
            file.write(json.dumps({"tokens": tokens, "group": i % 2, "reward": float(i // 2 % 2)}) + "\n")
    return path


def test_recipes_of_a_tiny_model(
    model: Path, rows: Path, tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ranks that already run; the tests of ``cli.score`` have the engine start its own."""
    monkeypatch.setattr(score, "run_processes", lambda function, processes, *args: ranks.run(function, *args))
    out, recipes = tmp_path / "fp8.json", ("tensorwise", "blockwise")
    words = ["fp8", "--model", str(model), "--input", str(rows), "--output", str(out), "--estimator", "grpo_s"]
    assert benchmark.main([*words, "--recipes", *recipes]) == 0
    results = json.loads(out.read_text())
    assert results["rows"] == len(LENGTHS) and results["tokens"] == sum(LENGTHS) - len(LENGTHS)
    assert list(results["candidates"]) == list(recipes)
    for budget in results["candidates"].values():
        assert 1e-4 < budget["entropy_error_mean"] < 0.5 and 1 < budget["ratio_error"] < 1.5


class Scores:
    """Stands in for the engine: the values of each precision come from a table."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **offsets: float) -> None:
        generator = torch.Generator().manual_seed(3)
        self.mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
        self.exact = torch.rand(2, *self.mask.shape, generator=generator) * self.mask
        self.noise = torch.randn(2, *self.mask.shape, generator=generator) * self.mask
        self.offsets = offsets
        monkeypatch.setattr(credit_errors, "score", self.score)

    def score(self, model: ScoreModel, source: Any, target: Path, processes: int) -> None:
        values = self.exact + (self.offsets[model.fp8.recipe] if model.fp8 else 0.0) * self.noise
        with target.open("w") as file:
            for (log_probs, entropies), mask in zip(values.unbind(1), self.mask, strict=True):
                row = {"log_probs": log_probs[mask].tolist(), "entropies": entropies[mask].tolist()}
                file.write(json.dumps(row) + "\n")


@pytest.mark.parametrize("config", [GTPOConfig(), GRPOSConfig()])
def test_each_recipe_is_compared_with_bf16(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = Scores(monkeypatch, delayed=0.0, tensorwise=0.1, blockwise=0.01)
    estimator = EntropyCredit("gtpo" if isinstance(config, GTPOConfig) else "grpo_s", config)
    credit = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 1, 0, 1, 0, 1])
    recipes = {name: Fp8Options("emulated", name) for name in scores.offsets}
    found = compare(ScoreModel("anywhere"), None, 1, recipes, estimator, *credit)["candidates"]  # type: ignore[arg-type]
    noise = scores.noise[:, scores.mask].abs().mean(-1).tolist()
    for name, size in scores.offsets.items():
        assert found[name]["log_prob_error_mean"] == pytest.approx(size * noise[0], rel=1e-4, abs=1e-9)
        assert found[name]["entropy_error_mean"] == pytest.approx(size * noise[1], rel=1e-4, abs=1e-9)
    assert found["delayed"]["share_rank_correlation"] == pytest.approx(1)
    if isinstance(config, GTPOConfig):  # six responses keep their order, their tokens do not
        assert found["tensorwise"]["share_rank_correlation"] < found["blockwise"]["share_rank_correlation"] < 1
    assert found["delayed"]["advantage_error_mean"] == 0 < found["blockwise"]["advantage_error_mean"]


def test_groups_are_prompts_or_what_they_are_called(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    entries = [
        {"prompt": "a", "response": "x", "reward": 1},
        {"tokens": [1], "group": "b", "reward": 0.5},
        {"prompt": "a", "response": "y", "reward": 0},
        {"prompt": "a", "response": "z", "group": "b", "reward": -1},
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    outcome, group_ids = read_credit(path)
    assert outcome.tolist() == [1.0, 0.5, 0.0, -1.0] and group_ids.tolist() == [0, 1, 0, 1]
