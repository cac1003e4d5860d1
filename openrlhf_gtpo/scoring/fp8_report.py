"""What FP8 does to the entropy credit of given responses, recipe by recipe: the engine of ``cli.report fp8``."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.scoring.models import ScoreModel
from openrlhf_gtpo.scoring.rows import RowFile

QUANTILES = 100  # of the errors, for plots


@dataclass(frozen=True)
class Credit:
    """Of every line of the input: its reward, and which lines answer the same prompt, as numbers from 0."""

    outcome: list[float]
    group_ids: list[int]


def read_credit(path: Path) -> Credit:
    """``reward`` and ``group`` (where it is left out, ``prompt``) of JSON lines that :class:`RowFile` has accepted.

    Raises:
        UsageError: a line without a reward or group, or a group of one line, with the line.
    """
    outcome, keys, lines = [], [], {}
    for number, entry in enumerate(_entries(path), 1):
        where = f"{path}:{number}"
        reward = entry.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) < float("inf"):
            raise UsageError(f'{where} has no reward; add "reward": NUMBER.')
        key = entry.get("group", entry.get("prompt"))
        if not isinstance(key, str | int):
            raise UsageError(f'{where} has no prompt to tell its group by; add "group": NAME_OR_NUMBER.')
        outcome.append(float(reward))
        keys.append(key)
        lines[key] = number
    if not keys:
        raise UsageError(f"{path} is empty; give a line for each response.")
    places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    sizes = Counter(keys)
    for key, number in lines.items():
        if sizes[key] == 1:
            raise UsageError(f"{path}:{number} is alone in its group, and credit compares the answers to a prompt.")
    return Credit(outcome, [places[key] for key in keys])


def compare(
    model: ScoreModel,
    source: RowFile,
    processes: int,
    candidates: Mapping[str, Fp8Options],
    estimator: Any,
    credit: Credit,
) -> dict[str, Any]:
    """Score ``source`` without FP8 and with each of ``candidates``, and compare.

    Args:
        estimator: an ``EntropyCredit``.

    Returns:
        ``rows``, ``tokens``, and by candidate the fields of ``ErrorBudget`` with quantiles of the errors (0 … 1 in
        ``QUANTILES`` steps) of entropies and log-probs.

    Raises:
        UsageError, LaunchError, ProcessFailed: see :func:`openrlhf_gtpo.scoring.score.score`.
    """
    import torch

    from openrlhf_gtpo.token_values import TokenValues

    outcome, group_ids = torch.tensor(credit.outcome), torch.tensor(credit.group_ids)
    exact, mask = _values(model, source, processes)
    found: dict[str, Any] = {}
    for name, fp8 in candidates.items():
        rough, _ = _values(replace(model, fp8=fp8), source, processes)
        budget = estimator.error_budget(TokenValues(*exact), TokenValues(*rough), mask, outcome, group_ids)
        errors = {
            kind: _quantiles((one - other)[mask].abs())
            for kind, one, other in zip(("log_prob_errors", "entropy_errors"), exact, rough, strict=True)
        }
        found[name] = asdict(budget) | errors
    return {"rows": len(outcome), "tokens": int(mask.sum()), "candidates": found}


def _values(model: ScoreModel, source: RowFile, processes: int) -> tuple[Any, Any]:
    """(2, B, T) log-probs and entropies, and (B, T) where a token was scored."""
    import torch

    from openrlhf_gtpo.scoring.score import score

    with TemporaryDirectory() as folder:
        target = Path(folder) / "scores.jsonl"
        score(model, source, target, processes)
        rows = [(entry["log_probs"], entry["entropies"]) for entry in _entries(target)]
    width = max(len(log_probs) for log_probs, _ in rows)
    values = torch.zeros(2, len(rows), width)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        mask[i, : len(row[0])] = True
        values[:, i, : len(row[0])] = torch.tensor(row)
    return values, mask


def _quantiles(errors: Any) -> Sequence[float]:
    ordered = errors.sort().values
    places = [round(i / QUANTILES * (len(ordered) - 1)) for i in range(QUANTILES + 1)]
    return ordered[places].tolist()


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)
