"""Plots of benchmark results, as PNG: the times of ``lm-head`` relative to the bare product, and the phases of
``train``'s steps. Must not import torch."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.suite.step_phases import COUNTED, IDLE, PHASES
from openrlhf_gtpo.report.curves import COLORS, STYLE, save

_LM_HEAD = {"forward": "forward / one product", "forward_backward": "forward + backward / four products"}
_IDLE_COLOR = "#CCCCCC"


def plot_lm_head(cases: Sequence[Mapping[str, Any]], png_path: str | Path) -> Path:
    """Plot a row of two panels per case; bars are medians, whiskers the range. Creates the parents of ``png_path``."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 0.9 + 2.6 * len(cases)), layout="constrained")
        panels = figure.subplots(len(cases), len(_LM_HEAD), squeeze=False)
        for row, case in zip(panels, cases, strict=True):
            shape, ranks = case["shape"], case["tensor_parallel"]
            label = f"{shape['tokens']} x {shape['width']} x {shape['vocabulary']} {shape['dtype']}, TP{ranks}"
            for axes, (phase, title) in zip(row, _LM_HEAD.items(), strict=True):
                ratios = {name: phases[phase] for name, phases in case["over_product"].items() if phases[phase]}
                names = list(ratios)[::-1]
                medians = [statistics.median(ratios[name]) for name in names]
                below = [median - min(ratios[name]) for name, median in zip(names, medians, strict=True)]
                above = [max(ratios[name]) - median for name, median in zip(names, medians, strict=True)]
                colors = [COLORS[0] if name.startswith("openrlhf_gtpo") else "#999999" for name in names]
                axes.barh(names, medians, xerr=(below, above), color=colors, error_kw={"elinewidth": 1})
                for i, (median, length) in enumerate(zip(medians, above, strict=True)):
                    axes.annotate(f" {median:.2f}", (median + length, i), va="center", fontsize=8)
                axes.axvline(1, color="black", linewidth=0.8)
                axes.set_xlim(0, 1.15 * max((m + a for m, a in zip(medians, above, strict=True)), default=1))
                axes.set_title(f"{label}\n{title}", fontsize=9)
        return save(figure, png_path)


def plot_step_phases(results: Mapping[str, Any], png_path: str | Path) -> Path:
    """Plot a stacked bar of seconds for each configuration, and tokens/s/GPU by phase relative to the first; whiskers
    are the range over rounds. Creates the parents of ``png_path``."""
    many = bool(results["ratios"])
    bars = len(results["summary"])
    height = 1.9 + max(0.55 * bars, 0.3 * len(COUNTED) * len(results["ratios"]))
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x"}):
        figure = Figure(figsize=(13 if many else 9, height), layout="constrained")
        grid = figure.add_gridspec(1, 2 if many else 1, width_ratios=(3, 2) if many else (1,))
        bars_of_seconds = figure.add_subplot(grid[0])
        _stack(bars_of_seconds, results["summary"])
        if many:
            _ratios(figure.add_subplot(grid[1]), results)
        handles, labels = bars_of_seconds.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        return save(figure, png_path)


def _stack(axes: Axes, summaries: Mapping[str, Any]) -> None:
    names = list(summaries)
    longest = max(sum(_seconds(summary).values()) for summary in summaries.values())
    ends = dict.fromkeys(names, 0.0)
    for index, phase in enumerate((*PHASES, IDLE)):
        color = _IDLE_COLOR if phase == IDLE else COLORS[index]
        widths = [_seconds(summaries[name])[phase] for name in names]
        axes.barh(names, widths, left=[ends[n] for n in names], color=color, label=phase.replace("_", " "), zorder=3)
        for row, (name, width) in enumerate(zip(names, widths, strict=True)):
            if width > 0.06 * longest:
                text = "black" if phase == IDLE else "white"
                share = width / sum(_seconds(summaries[name]).values())
                middle = ends[name] + width / 2
                label = f"{width:.2f} s\n{share:.0%}"
                axes.text(middle, row, label, ha="center", va="center", color=text, fontsize=8, zorder=4)
            ends[name] += width
    axes.invert_yaxis()
    axes.set_title("seconds of a step")
    axes.set_xlabel("seconds")


def _seconds(summary: Mapping[str, Any]) -> dict[str, float]:
    seconds = {phase: summary["phases"][phase]["seconds"] for phase in PHASES}
    return seconds | {IDLE: max(0.0, summary[IDLE]["seconds"])}


def _ratios(axes: Axes, results: Mapping[str, Any]) -> None:
    base = next(iter(results["summary"]))
    phases = [phase for phase in COUNTED if any(phase in by_phase for by_phase in results["ratios"].values())]
    width = 0.8 / len(results["ratios"])
    for index, (name, ratios) in enumerate(results["ratios"].items()):
        for row, phase in enumerate(phases):
            if phase not in ratios:
                continue
            low, median, high = ratios[phase]
            where = row + (index - (len(results["ratios"]) - 1) / 2) * width
            color = str(0.35 + 0.5 * index / len(results["ratios"]))  # gray, because the other colors stand for phases
            label = name if row == 0 else None
            spread = ([median - low], [high - median])
            axes.barh(where, median, width * 0.9, xerr=spread, color=color, label=label, error_kw={"elinewidth": 1})
            axes.annotate(f" {median:.2f}", (high, where), va="center", fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(phases)), [phase.replace("_", " ") for phase in phases])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(high for by_phase in results["ratios"].values() for _, _, high in by_phase.values()))
    axes.set_title(f"tokens/s/GPU, times {base}'s")
    if len(results["ratios"]) > 1:
        axes.legend(frameon=False, fontsize=8)
    else:
        axes.set_xlabel(f"{next(iter(results['ratios']))} / {base}")
