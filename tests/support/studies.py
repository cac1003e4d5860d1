"""Writes a finished experiment to disk, with numbers drawn here."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter


def write_run(folder: Path, seed: int, better: float, steps: int = 20, settings: dict | None = None) -> Path:
    """Write a run whose answers to 40 questions score ``better`` more than the 0.5 of a run with the same seed."""
    random = np.random.default_rng([seed, round(1000 * better)])
    by_question = np.random.default_rng(0).uniform(0.2, 0.8, 40)
    with closing(MetricsWriter(folder / "metrics.jsonl")) as writer:
        writer.begin(0, {"seed": seed, "estimator": "gtpo"})
        for step in range(1, steps + 1):
            rise = better * step / steps + random.normal(0, 0.02)
            metrics = {names.ENTROPY_ALL: 0.5 + rise, names.RESPONSE_LENGTH_MEAN: 900 + 20 * step + 400 * rise}
            metrics |= {names.REWARD_MEAN: 0.3 + rise, names.REWARD_BEST_AT_G: 0.6 + rise}
            writer.write("train", step, metrics)
            if step % 5 == 0:
                best = {"eval_math_pass32": 0.7 + rise, "eval_math_pass16": 0.65 + rise, "eval_math_pass1": 0.4 + rise}
                writer.write("eval", step, best)
        writer.end()
    scores = by_question + better + random.normal(0, 0.02) + random.normal(0, 0.05, 40)
    passes = {f"pass@{k}": np.clip(scores + 0.05 * k**0.5, 0, 1).tolist() for k in (1, 4, 32)}
    evaluated = {"questions": {"math500": "digest"}, "scores": {"math500": {"mean@32": scores.tolist()} | passes}}
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / "scores.json").write_text(json.dumps(evaluated))
    (folder / "flags.json").write_text(json.dumps({"train.seed": seed, **(settings or {})}))
    return folder


def write_study(root: Path, methods: dict[str, float], seeds: int = 3, steps: int = 20) -> Path:
    for method, better in methods.items():
        for seed in range(1, seeds + 1):
            flags = {"actor.model_name_or_path": "MODEL", "algo.advantage.estimator": method}
            write_run(root / method / f"seed-{seed}", seed, better, steps, flags)
    return root
