"""Results of ``report fp8`` as a page: a table and a picture."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from openrlhf_gtpo.report.curves import COLORS, STYLE, save

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


def table(results: Mapping[str, Any]) -> str:
    """A markdown table, a row for each candidate."""
    heads = [title for title, _ in _COLUMNS.values()]
    lines = ["| | " + " | ".join(heads) + " |", "|---" + "|---:" * len(heads) + "|"]
    for name, budget in results["candidates"].items():
        cells = [form.format(budget[field]) for field, (_, form) in _COLUMNS.items()]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(results: Mapping[str, Any]) -> str:
    """Which candidates keep sign flips low, in a sentence."""
    good = [name for name, budget in results["candidates"].items() if budget["sign_flips"] < ACCEPTED]
    limit = f"{ACCEPTED:.0%} of the tokens with an advantage"
    if not good:
        return f"None keeps sign flips under {limit}."
    return f"Sign flips stay under {limit} with: {'; '.join(good)}."


def write_page(results: Mapping[str, Any], folder: Path, about: str) -> Path:
    """Write ``fp8.md`` and ``fp8.png`` into ``folder``.

    Args:
        about: a sentence on what was compared.
    """
    _plot(results, folder / "fp8.png")
    page = folder / "fp8.md"
    parts = (
        "# What FP8 does to entropy credit",
        about,
        table(results) + "\n" + verdict(results),
        "![errors](fp8.png)",
    )
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def _plot(results: Mapping[str, Any], path: Path) -> None:
    """Sign flips as bars; for both errors, the share of tokens (logarithmic) whose error is larger."""
    candidates = results["candidates"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.2), layout="constrained")
        flips, *errors = figure.subplots(1, 3)
        colors = [COLORS[i % len(COLORS)] for i in range(len(candidates))]
        percents = [100 * budget["sign_flips"] for budget in candidates.values()]
        flips.barh(list(candidates)[::-1], percents[::-1], color=colors[::-1])
        for i, percent in enumerate(percents[::-1]):
            flips.annotate(f" {percent:.2f} %", (percent, i), va="center", fontsize=9)
        flips.axvline(100 * ACCEPTED, color="black", linewidth=0.8, linestyle="--")
        flips.set_xlim(0, 1.2 * max(*percents, 100 * ACCEPTED))
        flips.set_title("Advantages that change sign, %")
        titles = {"entropy_errors": "|ΔH|, nats", "log_prob_errors": "|Δ log π|"}
        for axes, (field, title) in zip(errors, titles.items(), strict=True):
            for color, (name, budget) in zip(colors, candidates.items(), strict=True):
                values = budget[field][:-1]  # nothing is larger than the last
                larger = [1 - i / len(values) for i in range(len(values))]
                axes.plot(values, larger, label=name, color=color)
            axes.set_yscale("log")
            axes.set_ylim(0.01, 1)
            axes.set_xlim(left=0)
            axes.set_title(f"Share of tokens with a larger {title}")
            axes.set_xlabel(title)
        errors[-1].legend(fontsize=8)
        save(figure, path)
