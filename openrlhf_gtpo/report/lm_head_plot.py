"""Results of ``benchmark lm-head`` as PNG: each way's time over the bare product's, forward and forward + backward."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from openrlhf_gtpo.report.curves import COLOURS, STYLE

_PHASES = {"forward": "forward / one product", "forward_backward": "forward + backward / four products"}


def plot_lm_head(cases: Sequence[Mapping[str, Any]], png_path: str | Path) -> Path:
    """A row of two panels for each case; bars are medians, whiskers the whole range. Parents of ``png_path`` are created."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 0.9 + 2.6 * len(cases)), layout="constrained")
        panels = figure.subplots(len(cases), len(_PHASES), squeeze=False)
        for row, case in zip(panels, cases, strict=True):
            for axes, (phase, title) in zip(row, _PHASES.items(), strict=True):
                ratios = {name: phases[phase] for name, phases in case["over_product"].items() if phases[phase]}
                names = list(ratios)[::-1]
                medians = [statistics.median(ratios[name]) for name in names]
                below = [median - min(ratios[name]) for name, median in zip(names, medians, strict=True)]
                above = [max(ratios[name]) - median for name, median in zip(names, medians, strict=True)]
                colours = [COLOURS[0] if name.startswith("openrlhf_gtpo") else "#999999" for name in names]
                axes.barh(names, medians, xerr=(below, above), color=colours, error_kw={"elinewidth": 1})
                for i, (median, more) in enumerate(zip(medians, above, strict=True)):
                    axes.annotate(f" {median:.2f}", (median + more, i), va="center", fontsize=8)
                axes.axvline(1, color="black", linewidth=0.8)
                axes.set_xlim(0, 1.15 * max(m + a for m, a in zip(medians, above, strict=True)))
                axes.set_title(f"{_label(case)}\n{title}", fontsize=9)
        path = Path(png_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    return path


def _label(case: Mapping[str, Any]) -> str:
    shape = case["shape"]
    return (
        f"{shape['tokens']} x {shape['width']} x {shape['vocabulary']} {shape['dtype']}, TP{case['tensor_parallel']}"
    )
