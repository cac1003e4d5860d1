"""Dumps made by hand: what a run would write, without a run."""

from pathlib import Path
from typing import Any

import numpy as np

from openrlhf_gtpo.report.rollouts import dump_file, write_dump

WORDS = [
    " the",
    " sum",
    " is",
    " 12",
    "\n",
    " so",
    "<|im_end|>",
    " 数",
    "学",
    " مرحبا",
    "  ",
    "\t",
    "$\\frac{1}{2}$",
    "",
]
HOSTILE = ["<script>", "window.harmed=1", "</script>", "<img src=x onerror=window.harmed=1>", "\u202eright", "&amp;"]
SETTINGS: dict[str, Any] = {
    "openrlhf_gtpo": "0.0",
    "policy_version": 0,
    "model": "tiny <b>model</b>",
    "seed": 1,
    "temperature": 1.0,
    "estimator": "gtpo",
    "config": None,
    "kl_coefficient": 0.0,
    "outcome_dtype": "float32",
}


def columns(groups: int = 3, samples: int = 4, longest: int = 12, seed: int = 0) -> dict[str, Any]:
    """Ragged responses with holes in some masks and hostile text in the first; the second group has only
    failures."""
    random = np.random.default_rng(seed)
    rows = groups * samples
    lengths = random.integers(max(1, longest // 2), longest + 1, rows)
    lengths[0] = max(longest, len(HOSTILE))
    masks = [np.ones(n, bool) for n in lengths]
    for mask in masks[1::3]:
        mask[2:4] = False
    outcome = (np.arange(rows) % 2 == 0).astype(float)
    outcome[samples : 2 * samples] = 0
    words = [[WORDS[i] for i in random.integers(0, len(WORDS), n)] for n in lengths]
    words[0][: len(HOSTILE)] = HOSTILE
    return {
        "row": np.arange(rows),
        "group": np.arange(rows) // samples,
        "prompt": [
            f"<|im_start|>user\nWhat is {i // samples} + 3?<script>window.harmed=1</script>" for i in range(rows)
        ],
        "outcome": outcome,
        "length_penalty": np.where(np.arange(rows) == 2, -0.25, 0.0),
        "truncated": lengths == longest,
        "guided": np.arange(rows) % samples == samples - 1,
        "prompt_tokens": [[1, 2]] * rows,
        "tokens": [list(range(n)) for n in lengths],
        "pieces": words,
        "mask": masks,
        "log_probs": [-random.exponential(1.0, n).astype(np.float32) for n in lengths],
        "rollout_log_probs": None,
        "entropy": [random.exponential(1.0, n).astype(np.float32) for n in lengths],
        "advantages": [random.normal(size=n).astype(np.float32) * mask for n, mask in zip(lengths, masks)],
        "versions": None,
        "ratio": (ratios := [random.normal(1.0, 0.2, n).astype(np.float32) for n in lengths]),
        "clipped": [np.abs(ratio - 1) > 0.2 for ratio in ratios],
        "texts": None,
    }


def write(folder: Path, step: int = 1, table: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write a dump of step ``step`` to ``folder`` and return its path."""
    table = table or columns(seed=step)
    path = dump_file(folder, step)
    defaults = SETTINGS | {"step": step, "batch_rows": len(table["row"])}
    write_dump(path, defaults | settings, table)
    return path
