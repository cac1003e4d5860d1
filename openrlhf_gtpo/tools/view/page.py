"""Makes one HTML file from dumps: Python computes and packs the numbers, ``page.js`` displays them in the browser.

A token's number takes 16 bits: three significant digits and a power of ten, which is what the page prints.
"""

import base64
import hashlib
import json
import random
import zlib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import numpy as np
from torch import Tensor

from openrlhf_gtpo import __version__
from openrlhf_gtpo.algorithms import ESTIMATORS, CreditParts
from openrlhf_gtpo.report.rollouts import RolloutDump
from openrlhf_gtpo.tools.view.credit import Method, credit

_LOWEST = -20  # power of ten of code 0 << 11; codes cover 32
_SAME = 1e-5  # relative difference up to which recomputed advantages count as the run's
_MISSING = {
    "entropy": "entropies, which shares, rewards and recomputed advantages need",
    "log_probs": "log-probs of the policy",
    "rollout_log_probs": "the sampler's log-probs",
    "ratio": "the ratio of the trained to the old policy, and the clipped tokens",
}


class Packed:
    """Collects what the page stores once: arrays as compressed text, and the texts of tokens and prompts."""

    def __init__(self) -> None:
        self.arrays: list[str] = []
        self.pieces: dict[str, int] = {}
        self.prompts: dict[str, int] = {}

    def array(self, values: np.ndarray) -> int:
        """Add an array as text (bytes of equal significance together, deflated, base64); return its index."""
        planes = values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()
        self.arrays.append(base64.b64encode(zlib.compress(planes, 7)).decode())
        return len(self.arrays) - 1


def decimal_codes(values: np.ndarray) -> np.ndarray:
    """Encode as (N,) uint16: (power of ten + 20) << 11 | three signed digits + 1024; digits of -1024 are NaN."""
    size = np.abs(values.astype(np.float64))
    good = np.isfinite(size)
    size = np.where(good & (size >= 10.0 ** (_LOWEST + 2)), size, 0)
    power = np.where(size > 0, np.floor(np.log10(np.where(size > 0, size, 1))) - 2, _LOWEST).astype(int)
    up, down = 10.0 ** np.maximum(-power, 0), 10.0 ** np.maximum(power, 0)
    digits = np.rint(size * up / down)
    carried = digits >= 1000
    power, digits = power + carried, np.where(carried, 100, digits)
    codes = (np.clip(power - _LOWEST, 0, 31) << 11) | (np.copysign(digits, values) + 1024).astype(int)
    return np.where(good, codes, 0).astype(np.uint16)


def make_page(dumps: Sequence[RolloutDump], methods: Sequence[Method], max_tokens: int) -> tuple[str, list[str]]:
    """Make the page; also return sentences about what it does not show.

    Args:
        dumps: one per step.
        methods: how to compute advantages; the first is shown first.
        max_tokens: tokens of all steps together; beyond this, each step shows a sample of its groups.
    """
    packed = Packed()
    everything = sum(len(dump.columns["tokens"].values) for dump in dumps)
    steps = [_step(dump, methods, min(1.0, max_tokens / max(1, everything)), packed) for dump in dumps]
    notes = sorted({note for step in steps for note in step["notes"]})
    data = {
        "version": __version__,
        "methods": [_method(method) for method in methods],
        "steps": steps,
        "prompts": list(packed.prompts),
        "pieces": list(packed.pieces),
    }
    return _html(data, packed.arrays), notes


def _method(method: Method) -> dict[str, Any]:
    config, estimator = method.config, ESTIMATORS[method.name]
    return {
        "label": method.label,
        "level": estimator.level,
        "compare": getattr(config, "compare", None),
        "mean": getattr(config, "entropy_mean", "arithmetic"),
        "entropy_eps": getattr(config, "entropy_eps", None),
        "rewards": [estimator.formula and estimator.formula(config, succeeded) for succeeded in (False, True)],
        "settings": ", ".join(f"{name} {value}" for name, value in vars(config).items()),
        "known": estimator.formula is not None,
    }


def _step(dump: RolloutDump, methods: Sequence[Method], part: float, packed: Packed) -> dict[str, Any]:
    columns, settings = dump.columns, dump.settings
    notes = [f"Not in the dump: {missing}." for name, missing in _MISSING.items() if columns[name] is None]
    if len(columns["row"]) < settings["batch_rows"]:
        notes.append("The dump has a sample of a step's groups, and statistics over a batch cover only that sample.")
    rows = _sampled_rows(dump, part)
    if len(rows) < len(columns["row"]):
        notes.append(
            "More tokens than --max-tokens: the page shows a sample of the groups, with advantages computed over all."
        )

    # For each token its row. For the shown rows the tokens, their mask and the rows' lengths.
    token_rows: np.ndarray = np.repeat(np.arange(len(columns["row"])), np.diff(columns["mask"].offsets))
    shown = np.isin(token_rows, rows)
    mask = columns["mask"].values[shown]
    lengths = np.diff(columns["mask"].offsets)[rows]

    # Helpers that pack the shown part of a column.
    def printed_rows(values: Any) -> list[Any]:
        return [_printed(values[row].item()) for row in rows]

    def pack_tokens(values: np.ndarray) -> int:
        return packed.array(decimal_codes(np.where(mask, values[shown], np.nan)))

    def pack_column(name: str) -> int | None:
        return None if columns[name] is None else pack_tokens(columns[name].values)

    def flatten(values: Tensor) -> np.ndarray:
        """Select from (B, T) the tokens of all rows, one row after another."""
        width = np.diff(columns["mask"].offsets)[:, None]
        array: np.ndarray = values.numpy()
        return array[np.arange(array.shape[1]) < width]

    def pack_part(values: Tensor | None) -> Any:
        return None if values is None else pack_tokens(flatten(values)) if values.dim() == 2 else printed_rows(values)

    # Compute the advantages with each method.
    credits: list[Any] = []
    own_is_shown = False  # True once a method reproduces the run's advantages
    for method in methods:
        try:
            credited = credit(dump, method)
        except ValueError as error:
            credits.append(None)
            notes.append(f"No advantages of {method.label}: {error}")
            continue
        advantages = flatten(credited.advantages)
        own_is_shown |= method.name == settings["estimator"] and _equal(advantages, columns["advantages"].values)
        parts = {name: pack_part(getattr(credited.parts, name, None)) for name in CreditParts._fields}
        credits.append(
            {"success": credited.success[rows].int().tolist(), "advantage": pack_tokens(advantages), **parts}
        )

    # A row's mean advantage over its action tokens.
    counted, num_rows = columns["mask"].values, len(columns["row"])
    actions = np.bincount(token_rows, counted, num_rows).astype(int)
    sums = np.bincount(token_rows, columns["advantages"].values * counted, num_rows)
    means = sums / np.maximum(1, actions)  # 0 for a row without action tokens
    pieces = columns["pieces"].values[shown]
    ids = packed.pieces
    return {
        "step": dump.step,
        "notes": notes,
        "settings": {name: value for name, value in settings.items() if name not in ("config", "version")},
        "offsets": np.concatenate([[0], lengths.cumsum()]).tolist(),
        "actions": actions[rows].tolist(),
        "row": columns["row"][rows].tolist(),
        "group": columns["group"][rows].tolist(),
        "prompt": [packed.prompts.setdefault(columns["prompt"][row], len(packed.prompts)) for row in rows],
        "outcome": printed_rows(columns["outcome"]),
        "penalty": printed_rows(columns["length_penalty"]),
        "truncated": columns["truncated"][rows].astype(int).tolist(),
        "guided": None if columns["guided"] is None else columns["guided"][rows].astype(int).tolist(),
        "advantage": printed_rows(means),
        "texts": None if columns["texts"] is None else [json.loads(columns["texts"][row]) for row in rows],
        "pieces": packed.array(np.array([ids.setdefault(piece, len(ids)) for piece in pieces], np.uint32)),
        "mask": packed.array(mask.astype(np.uint8)),
        "entropy": pack_column("entropy"),
        "log_prob": pack_column("log_probs"),
        "sampler": pack_column("rollout_log_probs"),
        "ratio": pack_column("ratio"),
        "clipped": pack_column("clipped"),
        "trained": None if own_is_shown else pack_tokens(columns["advantages"].values),
        "credits": credits,
    }


def _sampled_rows(dump: RolloutDump, part: float) -> np.ndarray:
    """Rows of random groups with at most a ``part`` of all tokens, but at least one group, in the dump's order."""
    group = dump.columns["group"]
    if part == 1:
        return np.arange(len(group))
    order = sorted(set(group.tolist()))
    random.Random(dump.step).shuffle(order)
    lengths = np.diff(dump.columns["tokens"].offsets)
    room = part * lengths.sum()
    chosen: list[int] = []
    for group_id in order:
        room -= lengths[group == group_id].sum()
        if chosen and room < 0:
            break
        chosen.append(group_id)
    return np.flatnonzero(np.isin(group, chosen))


def _equal(values: np.ndarray, reference: np.ndarray) -> bool:
    return bool(np.abs(values - reference).max(initial=0) <= _SAME * max(1.0, np.abs(reference).max(initial=0)))


def _printed(value: float) -> float | None:
    return float(f"{value:.3g}") if np.isfinite(value) else None


def _html(data: dict[str, Any], arrays: Sequence[str]) -> str:
    files = resources.files(__package__)
    page, style, script = ((files / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))

    def allowed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    policy = f"default-src 'none'; style-src {allowed(style)}; script-src {allowed(script)}"
    blocks = "\n".join(f'<script type="text/plain" id="array{i}">{text}</script>' for i, text in enumerate(arrays))
    # A "<" in a response's text must not end the script block.
    numbers = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    for mark, text in (
        ("POLICY", policy),
        ("STYLE", style),
        ("SCRIPT", script),
        ("ARRAYS", blocks),
        ("DATA", numbers),
    ):
        page = page.replace(f"@{mark}@", text, 1)
    return page
