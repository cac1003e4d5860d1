"""The effect of less exact log-probs and entropies on the advantages of responses.

The less exact values come from FP8, recipe by recipe (``benchmark fp8``), or from a trained rollout (``benchmark
mismatch``).
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.scoring.inputs import RowFile, ScoreModel, check
from openrlhf_gtpo.scoring.score import score
from openrlhf_gtpo.token_values import TokenValues

QUANTILES = 100  # of the errors
ACCEPTED = 0.02  # sign flips
_COLUMNS = {
    "sign_flips": ("sign flips", "{:.2%}"),
    "share_rank_correlation": ("rank correlation of shares", "{:.3f}"),
    "advantage_error_mean": ("mean \\|ΔA\\| / σ(A)", "{:.4f}"),
    "entropy_error_mean": ("mean \\|ΔH\\|, nats", "{:.4f}"),
    "entropy_error_p99": ("p99 \\|ΔH\\|", "{:.3f}"),
    "log_prob_error_mean": ("mean \\|Δ log π\\|", "{:.4f}"),
    "log_prob_error_p99": ("p99 \\|Δ log π\\|", "{:.3f}"),
    "ratio_error": ("mean exp \\|Δ log π\\|", "{:.3f}"),
}


def read_credit(path: Path) -> tuple[Tensor, Tensor]:
    """Read (B,) rewards and (B,) group numbers from 0 (by ``group`` or, without it, by ``prompt``) from JSON lines
    that :class:`RowFile` has accepted.

    Raises:
        UsageError: a line without a reward or group, or a group of one line. The message names the line.
    """
    outcome: list[float] = []
    lines_of: dict[str | int, list[int]] = {}  # line numbers of a group, from 1
    for number, entry in enumerate(_entries(path), 1):
        reward, group = entry.get("reward"), entry.get("group", entry.get("prompt"))
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UsageError(f'{path}:{number} has no number as its reward; add "reward": NUMBER.')
        if not isinstance(group, str | int):
            raise UsageError(f'{path}:{number} has no prompt to identify its group; add "group": NAME_OR_NUMBER.')
        outcome.append(float(reward))
        lines_of.setdefault(group, []).append(number)
    if not outcome:
        raise UsageError(f"{path} is empty; give a line for each response.")
    group_ids = [0] * len(outcome)
    for group_id, lines in enumerate(lines_of.values()):
        if len(lines) == 1:
            raise UsageError(f"{path}:{lines[0]} is alone in its group; give two or more answers to a prompt.")
        for number in lines:
            group_ids[number - 1] = group_id
    return torch.tensor(outcome), torch.tensor(group_ids)


def fp8_candidates(mode: str, recipes: Sequence[str], layers_in_bf16: int = 0) -> dict[str, Fp8Options]:
    """Return options by name: each recipe, also with its first and last ``layers_in_bf16`` layers in BF16."""
    candidates = {recipe: Fp8Options(mode, recipe) for recipe in recipes}
    n = layers_in_bf16
    for recipe in recipes if n else ():
        if recipe != "delayed":  # it takes all layers or none
            candidates[f"{recipe}, {n} + {n} layers in BF16"] = Fp8Options(mode, recipe, n, n)
    return candidates


def compare(
    model: ScoreModel,
    source: RowFile,
    processes: int,
    candidates: Mapping[str, Fp8Options],
    estimator: Any,
    outcome: Tensor,
    group_ids: Tensor,
) -> dict[str, Any]:
    """Score ``source`` without FP8 and with each of ``candidates``, and compare.

    Args:
        estimator: an ``EntropyCredit``.
        outcome, group_ids: of the rows, see :func:`read_credit`.

    Returns:
        ``rows``, ``tokens``, and for each of the ``candidates`` the fields of ``ErrorBudget`` with quantiles (0 … 1 in
        ``QUANTILES`` steps) of the errors of entropies and log-probs.

    Raises:
        UsageError: no token has an advantage.
        UsageError, LaunchError, ProcessFailed: see :func:`openrlhf_gtpo.scoring.score.score`.
    """
    exact, mask = _values(model, source, processes)
    _check_credit(exact, mask, estimator, outcome, group_ids)
    errors: dict[str, Any] = {}
    for name, fp8 in candidates.items():
        rough, _ = _values(replace(model, fp8=fp8), source, processes)
        errors[name] = _errors(exact, rough, mask, estimator, outcome, group_ids)
    return {"rows": len(outcome), "tokens": int(mask.sum()), "candidates": errors}


def compare_rollout(
    model: ScoreModel,
    rows: Sequence[tuple[Sequence[int], Sequence[int]]],
    recorded: Sequence[tuple[Sequence[float], Sequence[float]]],
    actions: Sequence[Sequence[bool]],
    estimator: Any,
    outcome: Tensor,
    group_ids: Tensor,
) -> dict[str, Any]:
    """Score a rollout with ``model``, and compare the result with the values that training used.

    Args:
        rows: the tokens of each row, split before the first sampled one.
        recorded: log-probs and entropies of the tokens in the second part.
        actions: which of these tokens to compare: the sampled ones.
        estimator, outcome, group_ids: as in :func:`compare`.

    Returns:
        as :func:`compare`, with the candidate "rollout".

    Raises:
        UsageError: the model cannot score such tokens, or none has an advantage; also the errors of
            :func:`openrlhf_gtpo.scoring.score.score`.
    """
    with TemporaryDirectory() as folder:
        source = Path(folder) / "rollout.jsonl"
        source.write_text("".join(json.dumps({"tokens": [*prompt, *sampled]}) + "\n" for prompt, sampled in rows))
        exact, mask = _values(model, check(model, source, Path(folder) / "scores.jsonl", 1), 1)
    rough = exact.new_zeros(exact.shape)
    mask = torch.zeros_like(mask)
    for row, (prompt, sampled) in enumerate(rows):
        columns = slice(len(prompt) - 1, len(prompt) - 1 + len(sampled))  # nothing predicts the first token
        rough[:, row, columns] = torch.tensor(recorded[row])
        mask[row, columns] = torch.tensor(actions[row])
    _check_credit(exact, mask, estimator, outcome, group_ids)
    errors = _errors(exact, rough, mask, estimator, outcome, group_ids)
    return {"rows": int(mask.any(dim=1).sum()), "tokens": int(mask.sum()), "candidates": {"rollout": errors}}


def table(results: Mapping[str, Any]) -> str:
    """Write a markdown table with a row for each candidate, and name the candidates with few sign flips."""
    heads = [title for title, _ in _COLUMNS.values()]
    lines = ["| | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name, budget in results["candidates"].items():
        cells = [form.format(budget[field]) for field, (_, form) in _COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    good = [name for name, budget in results["candidates"].items() if budget["sign_flips"] < ACCEPTED]
    limit = f"{ACCEPTED:.0%} of the tokens with an advantage"
    return "\n".join(lines) + f"\n\nSign flips under {limit}: {'; '.join(good) or 'none'}."


def _check_credit(exact: Tensor, mask: Tensor, estimator: Any, outcome: Tensor, group_ids: Tensor) -> None:
    """Raise UsageError if no token has an advantage, because no sign can flip then."""
    if not estimator.advantages(exact[1], mask, outcome, group_ids, None)[mask].any():
        raise UsageError(
            f"No token has an advantage with {estimator.name}, so no sign can flip. Rewards must differ within a "
            f"group; for gtpo and grpo_s, on both sides of success_threshold {estimator.config.success_threshold:g}."
        )


def _errors(
    exact: Tensor, rough: Tensor, mask: Tensor, estimator: Any, outcome: Tensor, group_ids: Tensor
) -> dict[str, Any]:
    """The fields of ``ErrorBudget`` and quantiles of the errors, from (2, B, T) log-probs and entropies."""
    result = asdict(estimator.error_budget(TokenValues(*exact), TokenValues(*rough), mask, outcome, group_ids))
    for kind, exact_values, rough_values in zip(("log_prob_errors", "entropy_errors"), exact, rough, strict=True):
        errors = (exact_values - rough_values)[mask].abs().sort().values
        result[kind] = [float(errors[round(i / QUANTILES * (len(errors) - 1))]) for i in range(QUANTILES + 1)]
    return result


def _values(model: ScoreModel, source: RowFile, processes: int) -> tuple[Tensor, Tensor]:
    """(2, B, T) log-probs and entropies, and the (B, T) mask of scored tokens."""
    with TemporaryDirectory() as folder:
        target = Path(folder) / "scores.jsonl"
        score(model, source, target, processes)
        rows = [torch.tensor([entry["log_probs"], entry["entropies"]]).T for entry in _entries(target)]
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return pad_sequence(rows, batch_first=True).permute(2, 0, 1).contiguous(), mask


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        yield from map(json.loads, lines)
