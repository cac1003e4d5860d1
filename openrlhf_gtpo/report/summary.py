"""A run in one screen: held-out reward before and after, and where the time of a step went.

Builds rich tables (plain text where the output is no terminal) and markdown. Must not know torch.
"""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, before_and_after, datasource_of, held_out_names, series


def run_summary(metrics: Rows) -> Group:
    """Tables for `rich.print`: held-out reward before, after and change; steps; seconds per step by phase; tokens/s."""
    return Group(_held_out_table(metrics), Text(""), _training_table(metrics), Text(""), _timing_table(metrics))


def print_run_summary(metrics: Rows, console: Console | None = None) -> None:
    """Print `run_summary`; without a terminal rich leaves colours out and the lines are plain text."""
    (console or Console()).print(run_summary(metrics))


def comparison_markdown(runs: Mapping[str, Sequence[Rows]]) -> str:
    """A markdown table of held-out reward before, after and change, a row for each run, and each label's means.

    The spread behind ± is the sample standard deviation over the label's runs. A run without an
    evaluation before training (step 0) or after it is left out of the means.
    """
    lines = ["| run | held-out task | before | after | change | steps |", "|---|---|---:|---:|---:|---:|"]
    for label, rows_of_runs in runs.items():
        totals: dict[str, list[tuple[float, float]]] = {}
        for number, rows in enumerate(rows_of_runs, start=1):
            steps = _last_step(rows)
            for name in held_out_names(rows) or [""]:
                before, after = before_and_after(rows, name)
                if before is not None and after is not None:
                    totals.setdefault(name, []).append((before, after))
                cells = " | ".join(_cells(before, after))
                task = datasource_of(name) if name else "none"
                lines.append(f"| {label}, run {_seed_of(rows, number)} | {task} | {cells} | {steps} |")
        for name, pairs in totals.items():
            changes = [after - before for before, after in pairs]
            spread = [_with_spread([b for b, _ in pairs]), _with_spread([a for _, a in pairs])]
            cells = f"{spread[0]} | {spread[1]} | {_with_spread(changes, signed=True)}"
            lines.append(f"| **{label}, mean of {len(pairs)}** | {datasource_of(name)} | {cells} | |")
    return "\n".join(lines) + "\n"


def _held_out_table(metrics: Rows) -> Table:
    table = Table(title="Held-out reward", title_justify="left")
    table.add_column("task")
    for column in ("before", "after", "change", "evaluations"):
        table.add_column(column, justify="right")
    found = held_out_names(metrics)
    for name in found:
        evaluations = len(series(metrics, names.KIND_EVAL, name)[0])
        table.add_row(datasource_of(name), *_cells(*before_and_after(metrics, name)), str(evaluations))
    if not found:
        table.add_row("no evaluation in this run", "-", "-", "-", "0")
    return table


def _training_table(metrics: Rows) -> Table:
    table = Table(title=f"Training: {_last_step(metrics)} steps", title_justify="left")
    table.add_column("metric")
    for column in ("first step", "last step"):
        table.add_column(column, justify="right")
    audit = (names.FP8_ENTROPY_ERROR, names.FP8_SIGN_FLIPS)
    for name in (names.REWARD_MEAN, names.ENTROPY_ALL, names.RESPONSE_LENGTH_MEAN, *audit):
        values = series(metrics, names.KIND_TRAIN, name)[1]
        if values:
            table.add_row(name, f"{values[0]:.3f}", f"{values[-1]:.3f}")
    return table


def _timing_table(metrics: Rows) -> Table:
    table = Table(title="Time per step (median)", title_justify="left")
    table.add_column("phase")
    for column in ("seconds", "share", "tokens/s"):
        table.add_column(column, justify="right")
    total = _median(metrics, names.TIMING_STEP_TOTAL)
    for phase in (*names.PHASES, "step_total"):
        seconds = _median(metrics, names.timing(phase))
        if seconds is None:
            continue
        rate = _median(metrics, names.tokens_per_second(phase))
        share = f"{seconds / total:.0%}" if total else "-"
        table.add_row(phase.replace("_", " "), f"{seconds:.2f}", share, "-" if rate is None else f"{rate:,.0f}")
    return table


def _cells(before: float | None, after: float | None) -> tuple[str, str, str]:
    change = "-" if before is None or after is None else f"{after - before:+.3f}"
    return _three_digits(before), _three_digits(after), change


def _three_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _with_spread(values: Sequence[float], signed: bool = False) -> str:
    middle = f"{mean(values):+.3f}" if signed else f"{mean(values):.3f}"
    return f"{middle} ± {stdev(values):.3f}" if len(values) > 1 else middle


def _seed_of(rows: Rows, number: int) -> str:
    """The run's number, and its seed where the run recorded one."""
    seeds = [row["seed"] for row in rows if row["kind"] == names.KIND_RUN and "seed" in row]
    return f"{number} (seed {seeds[-1]})" if seeds else str(number)


def _last_step(rows: Rows) -> int:
    return max((row["step"] for row in rows if row["kind"] == names.KIND_TRAIN), default=0)


def _median(rows: Rows, name: str) -> float | None:
    """Over steps: the first step warms caches up and would pull a mean."""
    values = sorted(series(rows, names.KIND_TRAIN, name)[1])
    if not values:
        return None
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
