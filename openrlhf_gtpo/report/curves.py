"""Runs as PNG: one run's reward, entropy and response length over steps, and several runs against each other.

Draws what `metrics.read_metrics` returns and computes nothing but means over seeds. Must not know torch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, before_and_after, datasource_of, held_out_names, series

# Okabe and Ito's colours, which stay apart for every common kind of colour blindness. Black is for "all".
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
STYLE = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
MARKERS = ("D", "s", "^", "v", "P", "X", "*")


def plot_run(metrics: Rows, png_path: str | Path, title: str = "") -> Path:
    """Three panels over steps: reward (training mean, held-out points), policy entropy, response length.

    What a run does not have (no evaluation, no entropies) is left out of its panel; an empty panel says so. Parents of
    `png_path` are created.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.4), layout="constrained")
        reward, entropy, length = figure.subplots(1, 3)
        train = names.KIND_TRAIN
        _line(reward, series(metrics, train, names.REWARD_MEAN), "training (mean of rollout)", COLOURS[0])
        held_out = held_out_names(metrics)
        for index, name in enumerate(held_out):
            label = "held out" if len(held_out) == 1 else f"held out: {datasource_of(name)}"
            points = series(metrics, names.KIND_EVAL, name)
            _line(
                reward,
                points,
                label,
                COLOURS[1 + index % 5],
                marker=MARKERS[index % len(MARKERS)],
                markersize=7,
                zorder=3,
            )
        _line(entropy, series(metrics, train, names.ENTROPY_ALL), "all tokens", "black")
        _line(entropy, series(metrics, train, names.ENTROPY_POSITIVE), "correct responses", COLOURS[2], linestyle="--")
        _line(
            entropy, series(metrics, train, names.ENTROPY_NEGATIVE), "incorrect responses", COLOURS[1], linestyle=":"
        )
        _line(length, series(metrics, train, names.RESPONSE_LENGTH_MEAN), "training", COLOURS[0])
        points = series(metrics, names.KIND_EVAL, names.EVAL_RESPONSE_LENGTH_MEAN)
        _line(length, points, "held out", COLOURS[1], marker=MARKERS[0], markersize=7, zorder=3)
        _finish(reward, "Reward", "mean reward")
        _finish(entropy, "Policy entropy", "nats per token")
        _finish(length, "Response length", "tokens")
        return _save(figure, png_path, title)


def plot_comparison(runs: Mapping[str, Sequence[Rows]], png_path: str | Path, title: str = "") -> Path:
    """Several runs (seeds) per label: training reward and entropy over steps, and held-out reward before and after.

    Each run is a thin line, and each label's mean over the runs that have a step is a thick one. In the last panel a
    run is a line from its held-out reward before training to that after it (mean over data sources); a run without
    either is not in it.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.4), layout="constrained")
        reward, entropy, held_out = figure.subplots(1, 3)
        for index, (label, rows_of_runs) in enumerate(runs.items()):
            colour = COLOURS[index % len(COLOURS)]
            for axes, name in ((reward, names.REWARD_MEAN), (entropy, names.ENTROPY_ALL)):
                lines = [series(rows, names.KIND_TRAIN, name) for rows in rows_of_runs]
                _thin_and_mean(axes, lines, f"{label} (n={len(rows_of_runs)})", colour)
            pairs = [pair for pair in map(_mean_before_and_after, rows_of_runs) if pair is not None]
            _thin_and_mean(
                held_out, [([0, 1], list(pair)) for pair in pairs], label, colour, marker=MARKERS[index % len(MARKERS)]
            )
        _finish(reward, "Training reward", "mean reward", legend=False)
        _finish(entropy, "Policy entropy", "nats per token", legend=False)
        _finish(held_out, "Held-out reward", "mean reward", x_label="", legend=False)
        # One for all panels, below them: the same colours mean the same runs.
        shown = [axes for axes in (reward, entropy, held_out) if axes.get_legend_handles_labels()[0]]
        if shown:
            handles, labels = shown[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)), frameon=False)
        held_out.set_xlim(-0.25, 1.25)
        held_out.set_xticks([0, 1], ["before", "after"])
        return _save(figure, png_path, title)


def _mean_before_and_after(rows: Rows) -> tuple[float, float] | None:
    """The mean over the data sources that have both; None where none has."""
    pairs = [before_and_after(rows, name) for name in held_out_names(rows)]
    both = [(before, after) for before, after in pairs if before is not None and after is not None]
    if not both:
        return None
    return sum(before for before, _ in both) / len(both), sum(after for _, after in both) / len(both)


def _line(axes: Axes, points: tuple[list[int], list[float]], label: str, colour: str, **style: Any) -> None:
    steps, values = points
    if not steps:
        return
    style.setdefault("marker", "o" if len(steps) <= 30 else "")
    style.setdefault("markersize", 3 if len(steps) > 1 else 6)
    axes.plot(steps, values, label=label, color=colour, **style)


def _thin_and_mean(
    axes: Axes, lines: Sequence[tuple[list[int], list[float]]], label: str, colour: str, marker: str = ""
) -> None:
    by_step: dict[int, list[float]] = {}
    for steps, values in lines:
        if not steps:
            continue
        for step, value in zip(steps, values):
            by_step.setdefault(step, []).append(value)
        axes.plot(steps, values, color=colour, linewidth=0.9, alpha=0.45, marker="o" if len(steps) == 1 else "", ms=3)
    if by_step:
        steps = sorted(by_step)
        means = [sum(by_step[step]) / len(by_step[step]) for step in steps]
        shown_marker = marker or ("o" if len(steps) == 1 else "")
        axes.plot(steps, means, color=colour, linewidth=2.4, marker=shown_marker, markersize=7, label=label)


def _finish(axes: Axes, title: str, y_label: str, x_label: str = "step", legend: bool = True) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded in this run", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    low, high = axes.get_ylim()
    axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))
    if x_label:
        last = max(1.0, *(float(max(line.get_xdata())) for line in axes.lines))
        axes.set_xlim(-0.04 * last, 1.04 * last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if legend and axes.get_legend_handles_labels()[0]:
        # Below the panel, where it can hide no data.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9)


def _save(figure: Figure, png_path: str | Path, title: str) -> Path:
    if title:
        figure.suptitle(title)
    path = Path(png_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, format="png")
    return path
