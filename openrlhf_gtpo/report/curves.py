"""Plots of runs: one run's reward, entropy and response length over steps, and several runs against each other.

Draws the runs of `metrics.read_runs`, and computes only means over seeds and data sources.
"""

import io
import math
import os
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, before_and_after, datasource_of, held_out_names, idle_steps, series

# Okabe and Ito's colors, distinct for every common kind of color blindness. Black is for "all".
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
STYLE = {"font.size": 10, "axes.grid": True, "grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False}
STYLE["text.parse_math"] = False  # titles and labels may contain any text
MARKERS = ("D", "s", "^", "v", "P", "X", "*")
LINES: tuple[Any, ...] = ("-", "--", ":", "-.", (0, (3, 1, 1, 1, 1, 1)))  # the next one after each round of colors
_NORMAL = 1.96  # half the width of a 95 % interval, in standard errors
_INK = "#010203"  # the text's color in a figure; its SVG takes the page's
_IN_PAGE = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
_SVG = {"svg.fonttype": "none", "svg.hashsalt": "", "legend.labelcolor": _INK}

Points = tuple[Sequence[int], Sequence[float]]  # steps and values


def plot_run(metrics: Rows, png_path: str | Path, title: str = "") -> Path:
    """Plot three panels over steps: reward (training mean, held-out points), policy entropy, response length. Held-out
    points have 95 % intervals over questions, and steps in which nothing was learned are shaded.

    Missing series (evaluations, entropies) are left out, and an empty panel says so. Creates the parents of
    `png_path`.
    """
    train = names.KIND_TRAIN
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.4), layout="constrained")
        reward, entropy, length = figure.subplots(1, 3)
        # Reward: training, then each data source with its intervals, over the shaded idle steps.
        _line(reward, series(metrics, train, names.REWARD_MEAN), "training (mean of rollout)", COLORS[0])
        held_out = held_out_names(metrics)
        for index, name in enumerate(held_out):
            label = "held out" if len(held_out) == 1 else f"held out: {datasource_of(name)}"
            marker = MARKERS[index % len(MARKERS)]
            points = series(metrics, names.KIND_EVAL, name)
            color = COLORS[1 + index % 5]
            _line(reward, points, label, color, marker=marker, markersize=7, zorder=3)
            errors = dict(zip(*series(metrics, names.KIND_EVAL, name + names.EVAL_ERROR_SUFFIX)))
            known = [(step, value, _NORMAL * errors[step]) for step, value in zip(*points) if step in errors]
            if known:
                reward.errorbar(*zip(*known), fmt="none", ecolor=color, capsize=3, zorder=3)
        for number, step in enumerate(idle_steps(metrics)):
            shade = {"color": "0.88", "linewidth": 0, "zorder": 0}
            reward.axvspan(step - 0.5, step + 0.5, label=None if number else "nothing learned", **shade)
        # Entropy by outcome, and lengths.
        for name, label, color, line in (
            (names.ENTROPY_ALL, "all tokens", "black", "-"),
            (names.ENTROPY_POSITIVE, "correct responses", COLORS[2], "--"),
            (names.ENTROPY_NEGATIVE, "incorrect responses", COLORS[1], ":"),
        ):
            _line(entropy, series(metrics, train, name), label, color, linestyle=line)
        _line(length, series(metrics, train, names.RESPONSE_LENGTH_MEAN), "training", COLORS[0])
        points = series(metrics, names.KIND_EVAL, names.EVAL_RESPONSE_LENGTH_MEAN)
        _line(length, points, "held out", COLORS[1], marker=MARKERS[0], markersize=7, zorder=3)
        # Titles, units and legends.
        for axes, panel, unit in (
            (reward, "Reward", "mean reward"),
            (entropy, "Policy entropy", "nats per token"),
            (length, "Response length", "tokens"),
        ):
            _finish(axes, panel, unit)
            if axes.lines:  # below the panel, so that it hides no data
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, frameon=False, fontsize=9)
        return save(figure, png_path, title)


def plot_comparison(runs: Mapping[str, Sequence[Rows]], png_path: str | Path, title: str = "") -> Path:
    """Plot several runs (seeds) per label: training reward and entropy over steps, held-out reward before and after.

    Each run is a thin line, and each label's mean over the runs that have a step is a thick one. In the last panel a
    run is a line from its held-out reward before training to the one after it (mean over data sources). A run that
    lacks either is left out.
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13, 4.2 + 0.2 * math.ceil(len(runs) / 4)), layout="constrained")  # and its legend
        reward, entropy, held_out = figure.subplots(1, 3)
        for index, (label, seeds) in enumerate(runs.items()):
            color, line = _color_and_line(index)
            name_and_number = f"{label} (n={len(seeds)})"
            for axes, name in ((reward, names.REWARD_MEAN), (entropy, names.ENTROPY_ALL)):
                lines: list[Points] = [series(rows, names.KIND_TRAIN, name) for rows in seeds]
                _thin_and_mean(axes, lines, name_and_number, color, line=line)
            pairs = [pair for rows in seeds if (pair := _mean_before_and_after(rows))]
            marker = MARKERS[index % len(MARKERS)]
            _thin_and_mean(held_out, [([0, 1], pair) for pair in pairs], name_and_number, color, marker, line)
        _finish(reward, "Training reward", "mean reward")
        _finish(entropy, "Policy entropy", "nats per token")
        _finish(held_out, "Held-out reward", "mean reward", over_steps=False)
        # One legend below all panels, because they share their colors.
        panels = (held_out, entropy, reward)  # a label may be in only one panel
        legend = {label: drawn for axes in panels for drawn, label in zip(*axes.get_legend_handles_labels())}
        if legend:
            ncols = min(4, len(legend))
            figure.legend(legend.values(), legend.keys(), loc="outside lower center", ncols=ncols, frameon=False)
        held_out.set_xlim(-0.25, 1.25)
        held_out.set_xticks([0, 1], ["before", "after"])
        return save(figure, png_path, title)


def plot_figures(runs: Mapping[str, Sequence[Rows]], folder: Path) -> dict[str, Path]:
    """Plot the paper's four figures, each as a PNG and an SVG in ``folder``: entropy, response length, and the mean
    over held-out questions of the best of 32 and of 16 responses.

    If no run was evaluated with that many, the best and the mean of a rollout's responses to a prompt replace them.

    Returns:
        The SVGs by title. Their text takes the color and the font of the page that includes them.
    """

    def train(name: str) -> Callable[[Rows], Points]:
        return lambda rows: series(rows, names.KIND_TRAIN, name)

    # Choose the four panels: title, unit, and how to read a run's points.
    panels: dict[str, tuple[str, Callable[[Rows], Points]]] = {
        "Policy entropy": ("nats per token", train(names.ENTROPY_ALL)),
        "Response length": ("tokens", train(names.RESPONSE_LENGTH_MEAN)),
    }
    best: dict[str, tuple[str, Callable[[Rows], Points]]] = {
        f"Best of {k} held-out responses": ("mean reward", partial(_best_of, k=k)) for k in names.BEST_OF
    }
    if not any(read(rows)[0] for _, read in best.values() for seeds in runs.values() for rows in seeds):
        best = {
            "Best of a prompt's responses, in training": ("mean reward", train(names.REWARD_BEST_AT_G)),
            "Training reward": ("mean reward", train(names.REWARD_MEAN)),
        }
    paths = {}
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE | _IN_PAGE | _SVG):
        for title, (unit, read) in (panels | best).items():
            figure = Figure(figsize=(5, 3.3 + 0.18 * math.ceil(len(runs) / 2)), layout="constrained")  # and its legend
            axes = figure.subplots()
            # Draw every label's runs and their mean, and name the labels without data.
            without = []
            for index, (label, seeds) in enumerate(runs.items()):
                color, line = _color_and_line(index)
                points = [read(rows) for rows in seeds]
                having = sum(bool(steps) for steps, _ in points)
                _thin_and_mean(axes, points, f"{label} (n={having})", color, line=line)
                if not any(steps for steps, _ in points):
                    without.append(label)
            _finish(axes, title, unit)
            if axes.lines and without:
                axes.set_xlabel(textwrap.fill(f"step; not recorded: {', '.join(without)}", 60))
            if axes.lines:
                figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8, handlelength=4)
            paths[title] = folder / f"{re.sub('[^a-z0-9]+', '_', title.lower())}.svg"
            _write(figure, paths[title].with_suffix(".png"), "png", dpi=130)
            _write(figure, paths[title], "svg", transparent=True, metadata={"Date": None})
    return paths


def _best_of(rows: Rows, k: int) -> Points:
    """Steps, and mean best rewards of evaluations with ``k`` responses to a question, averaged over data sources."""
    form = re.compile(names.eval_best_of(".*", k))
    recorded = {name for row in rows if row["kind"] == names.KIND_EVAL for name in row if form.fullmatch(name)}
    return _mean_by_step([series(rows, names.KIND_EVAL, name) for name in recorded])


def _mean_by_step(lines: Sequence[Points]) -> Points:
    """The steps of any of the lines, and at each step the mean over the lines that have it."""
    by_step: dict[int, list[float]] = {}
    for steps, values in lines:
        for step, value in zip(steps, values):
            by_step.setdefault(step, []).append(value)
    return sorted(by_step), [fmean(by_step[step]) for step in sorted(by_step)]


def save(figure: Figure, png_path: str | Path, title: str = "") -> Path:
    """Write a figure as PNG, and create the parents of ``png_path``."""
    if title:
        figure.suptitle(title)
    path = Path(png_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(figure, path, "png", dpi=130)
    return path


def _write(figure: Figure, path: Path, kind: str, **options: Any) -> None:
    """Write a figure to ``path`` atomically."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, **options)
    content = drawn.getvalue()
    if kind == "svg":
        content = content.replace(_INK.encode(), b"currentColor")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _mean_before_and_after(rows: Rows) -> list[float]:
    """The means before and after, over the data sources that have both; empty if none has."""
    pairs = [before_and_after(rows, name) for name in held_out_names(rows)]
    both = [(before, after) for before, after in pairs if before is not None and after is not None]
    return [sum(values) / len(both) for values in zip(*both)]


def _line(axes: Axes, points: Points, label: str, color: str, **style: Any) -> None:
    steps, values = points
    if steps:
        marker = {"marker": "o" if len(steps) <= 30 else "", "markersize": 3 if len(steps) > 1 else 6}
        axes.plot(steps, values, label=label, color=color, **(marker | style))


def _color_and_line(index: int) -> tuple[str, Any]:
    return COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)]


def _thin_and_mean(
    axes: Axes, lines: Sequence[Points], label: str, color: str, marker: str = "", line: Any = "-"
) -> None:
    for steps, values in lines:
        if steps:
            dot = "o" if len(steps) == 1 else ""
            axes.plot(steps, values, color=color, linewidth=0.9, alpha=0.45, marker=dot, markersize=3, rasterized=True)
    steps, means = _mean_by_step(lines)
    if steps:
        marker = marker or ("o" if len(steps) == 1 else "")
        axes.plot(steps, means, linestyle=line, color=color, linewidth=2.4, marker=marker, markersize=7, label=label)


def _finish(axes: Axes, title: str, y_label: str, over_steps: bool = True) -> None:
    axes.set_title(title)
    axes.set_ylabel(y_label)
    axes.set_xlabel("step" if over_steps else "")
    if not axes.lines:
        axes.text(0.5, 0.5, "not recorded in this run", ha="center", va="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    low, high = axes.get_ylim()
    if all(min(line.get_ydata()) >= 0 for line in axes.lines):  # a line of zeros gets a margin below zero
        low = 0.0
    axes.set_ylim(low, high + 0.05 * (high - low))
    if over_steps:
        last = max(1.0, *(float(max(line.get_xdata())) for line in axes.lines))
        axes.set_xlim(-0.04 * last, 1.04 * last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
