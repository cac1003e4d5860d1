"""``benchmark mismatch``: a dump that agrees with the model has no errors, an altered one those put in."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from openrlhf_gtpo.algorithms import GTPOConfig
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.report.rollouts import write_dump
from openrlhf_gtpo.scoring import score
from openrlhf_gtpo.scoring.inputs import ScoreModel, check
from tests.support.rank_pool import RankPool

PROMPTS, RESPONSES = (3, 2, 4, 3), (5, 7, 4, 6)


@pytest.fixture
def rollout(model: Path, tmp_path: Path, ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The columns of a dump with two groups, as the model itself scores them at temperature 0.7."""
    monkeypatch.setattr(score, "run_processes", lambda function, processes, *args: ranks.run(function, *args))
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(16, (p + n,), generator=generator).tolist() for p, n in zip(PROMPTS, RESPONSES)]
    source, target = tmp_path / "rows.jsonl", tmp_path / "scores.jsonl"
    source.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    policy = ScoreModel(str(model), temperature=0.7)
    score.score(policy, check(policy, source, target, 1), target, 1)
    scores = [json.loads(line) for line in target.read_text().splitlines()]
    said = {
        name: [np.float32(entry[key][p - 1 :]) for entry, p in zip(scores, PROMPTS)]
        for name, key in (("log_probs", "log_probs"), ("entropy", "entropies"))
    }
    masks = [np.ones(n, bool) for n in RESPONSES]
    masks[1][2:4] = False  # between two turns
    return said | {
        "row": list(range(4)),
        "group": [0, 0, 1, 1],
        "prompt": [""] * 4,
        "outcome": [1.0, 0.0, 1.0, 1.0],
        "length_penalty": [0.0] * 4,
        "truncated": [False] * 4,
        "guided": None,
        "prompt_tokens": [row[:p] for row, p in zip(rows, PROMPTS)],
        "tokens": [row[p:] for row, p in zip(rows, PROMPTS)],
        "pieces": [["x"] * n for n in RESPONSES],
        "mask": masks,
        "rollout_log_probs": None,
        "advantages": [np.zeros(n, np.float32) for n in RESPONSES],
        "versions": None,
        "ratio": None,
        "clipped": None,
        "texts": None,
    }


def errors_of(
    rollout: dict[str, Any],
    model: Path,
    tmp_path: Path,
    entropy: str = "sampler",
    rows: tuple[int, ...] = (0, 1, 2, 3),
) -> dict[str, Any]:
    """The errors of a dump, which must be those of ``rows``."""
    dump = tmp_path / "step_000001.parquet"
    settings = {"step": 1, "estimator": "gtpo", "config": vars(GTPOConfig()), "temperature": 0.7}
    write_dump(dump, settings | {"entropy": entropy, "outcome_dtype": "float32", "batch_rows": 4}, rollout)
    out = tmp_path / "out.json"
    assert benchmark.main(["mismatch", str(dump), "--model", str(model), "--output", str(out)]) == 0
    results = json.loads(out.read_text())
    assert (results["rows"], results["tokens"]) == (len(rows), sum(rollout["mask"][row].sum() for row in rows))
    return results["candidates"]["rollout"]


def test_errors_are_those_that_were_made(
    rollout: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = errors_of(rollout, model, tmp_path)
    # Batches of one row and of several round differently.
    assert errors["entropy_error_p99"] < 0.02 and errors["log_prob_error_p99"] < 0.05 and errors["sign_flips"] == 0
    said = capsys.readouterr().out
    assert "entropies of vLLM's sampler (or the actor, if the audit's gate was closed) against" in said
    assert "left out" not in said
    exact = errors["entropy_error_mean"]
    rollout["entropy"] = [values + np.float32(0.25) for values in rollout["entropy"]]
    rollout["log_probs"] = [values - np.float32(0.5) for values in rollout["log_probs"]]
    errors = errors_of(rollout, model, tmp_path)
    assert abs(errors["entropy_error_mean"] - 0.25) <= exact + 1e-3
    assert abs(errors["log_prob_error_mean"] - 0.5) < 0.05


def test_the_samplers_values_are_not_compared_in_rows_of_the_guide(
    rollout: dict[str, Any], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They have the actor's. With ``--rollout.entropy actor`` all rows have, and all are compared."""
    rollout["guided"] = [False, False, False, True]
    rollout["entropy"][3] = rollout["entropy"][3] + np.float32(8)
    errors = errors_of(rollout, model, tmp_path, rows=(0, 1, 2))
    assert errors["entropy_error_p99"] < 0.02
    assert "Left out: 1 rows of the guide, for which the policy's sampler has no values." in capsys.readouterr().out
    assert errors_of(rollout, model, tmp_path, entropy="actor")["entropy_error_p99"] > 7
    said = capsys.readouterr().out
    assert "entropies of the actor against" in said and "left out" not in said
