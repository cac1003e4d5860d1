"""A run on one screen: held-out reward before and after, and where a step's time went; several runs as markdown."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openrlhf_gtpo.report import bounds, names
from openrlhf_gtpo.report.metrics import (
    Rows,
    before_and_after,
    datasource_of,
    decimals,
    held_out_names,
    idle_sentence,
    late_training_reward,
    median_of_steps,
    series,
)


def print_run_summary(metrics: Rows) -> None:
    """Print a run's tables: held-out reward before, after and change, metrics of the first and last step (or of the
    nearest that has them), and a step's seconds and tokens/s by phase. Then print what would shorten a step, in how
    many steps nothing was learned, and the run's warnings. Without a terminal, the lines are plain text."""
    # Held-out reward.
    held_out = _table("Held-out reward ± standard error", "task", "before", "after", "change", "evaluations")
    for name in held_out_names(metrics):
        evaluations = len(series(metrics, names.KIND_EVAL, name)[0])
        cells = _cells(*before_and_after(metrics, name))
        for place, error in enumerate(before_and_after(metrics, name + names.EVAL_ERROR_SUFFIX)):
            cells[place] += "" if error is None else f" ± {decimals(error)}"
        held_out.add_row(escape(datasource_of(name)), *cells, str(evaluations))
    if not held_out.rows:
        held_out.add_row("no evaluation in this run", "-", "-", "-", "0")

    steps = [row for row in metrics if row["kind"] == names.KIND_TRAIN]
    # Metrics of the first and the last step.
    training = _table(f"Training: {_last_step(metrics)} steps", "metric", "first step", "last step")
    audit = (names.FP8_ENTROPY_ERROR, names.FP8_SIGN_FLIPS, *names.SAMPLER_AUDIT.values())
    for name in (names.REWARD_MEAN, names.ENTROPY_ALL, names.RESPONSE_LENGTH_MEAN, *audit):
        points = list(zip(*series(metrics, names.KIND_TRAIN, name)))
        if points:  # an audit's first and last step may differ from the run's
            ends = zip((points[0], points[-1]), (steps[0], steps[-1]))
            shown = (decimals(value) + (f" (step {at})" if at != row["step"] else "") for (at, value), row in ends)
            training.add_row(name, *shown)

    # Seconds of a step by phase.
    timing = _table("Time per step (median)", "phase", "seconds", "share", "tokens/s")
    timing.add_column("what bounds it")
    bound = bounds.notes(metrics)
    total = median_of_steps(metrics, names.TIMING_STEP_TOTAL)
    for phase in (*names.PHASES, "step_total"):
        took = median_of_steps(metrics, names.timing(phase))
        rate = median_of_steps(metrics, names.tokens_per_second(phase))
        if took is not None:
            share = f"{took / total:.0%}" if total else "-"
            rate_text = "-" if rate is None else f"{rate:{',.0f' if rate >= 10 else '.2g'}}"
            took_text = f"{took:{'.2f' if took >= 0.1 else '.2g'}}"
            timing.add_row(phase.replace("_", " "), took_text, share, rate_text, bound.get(phase, ""))
    # Print the tables, and below them what would help and what went wrong.
    console = Console()
    console.print(held_out, "", training, "", timing)
    if (start := sum(row.get(names.TIMING_START, 0.0) for row in metrics)) >= 1:
        console.print(f"\nStart, until the first rollout: {start:,.0f} s.", highlight=False)
    if (outside := bounds.between_steps(metrics)) >= 1:
        console.print(f"\nBetween steps, for evaluations and checkpoints: {outside:,.0f} s in all.", highlight=False)
    if gains := bounds.gains(metrics):
        console.print(
            "\nWhat could make it faster, and at most by how much, from this run's numbers:", highlight=False
        )
    for gain in gains:
        console.print(f"  {gain.factor:.2f} x: {gain.why}\n          {gain.flags}", markup=False, soft_wrap=True)
    if (clause := idle_sentence(metrics)) is not None:
        console.print(f"\n{clause[0].upper()}{clause[1:]}.", style="bold yellow", markup=False, highlight=False)

    for name in sorted({name for row in steps for name in row if name.startswith(names.WARNING_PREFIX)}):
        warned = [row for row in steps if name in row]
        text = f"Warning in {len(warned)} of {len(steps)} steps, last in step {warned[-1]['step']}: {warned[-1][name]}"
        console.print(f"\n{text}", markup=False, highlight=False, soft_wrap=True)


def comparison_markdown(runs: Mapping[str, Sequence[Rows]]) -> str:
    """Write a markdown table of held-out reward before, after and change: a row for each run, and each label's means.

    The spread behind ± is the sample standard deviation over the label's runs. A run without an evaluation before
    training (step 0) or after it is left out of the means. If no run has both, the table has the training reward of
    the last tenth of the steps. Runs with steps in which nothing was learned are listed below the table.
    """
    idle = []
    evaluated = any(held_out_names(rows) for rows_of_runs in runs.values() for rows in rows_of_runs)
    lines = ["| run | held-out task | before | after | change | steps |", "|---|---|---:|---:|---:|---:|"]
    if not evaluated:
        lines = ["| run | training reward, last tenth of the steps | steps |", "|---|---:|---:|"]
    for label, rows_of_runs in runs.items():
        label = label.replace("|", r"\|")
        # A row for each run and held-out task; without evaluations, the training reward.
        complete: dict[str, list[tuple[float, float]]] = {}
        for number, rows in enumerate(rows_of_runs, start=1):
            seeds = [row["seed"] for row in rows if row["kind"] == names.KIND_RUN and "seed" in row]
            run = f"{label}, run {number}" + (f" (seed {seeds[-1]})" if seeds else "")
            if (clause := idle_sentence(rows)) is not None:
                idle.append(f"\n{run}: {clause}.")
            if not evaluated:
                late = late_training_reward(rows)
                lines.append(f"| {run} | {'-' if late is None else decimals(late)} | {_last_step(rows)} |")
                continue
            for name in held_out_names(rows) or [""]:
                before, after = before_and_after(rows, name)
                task = datasource_of(name).replace("|", r"\|")
                if before is not None and after is not None:
                    complete.setdefault(task, []).append((before, after))
                cells = " | ".join(_cells(before, after))
                lines.append(f"| {run} | {task or 'none'} | {cells} | {_last_step(rows)} |")
        # Then the label's means.
        for task, pairs in complete.items():
            spreads = [_with_spread(values) for values in zip(*pairs)]
            spreads.append(_with_spread([after - before for before, after in pairs], "+"))
            lines.append(f"| **{label}, mean of {len(pairs)}** | {task} | {' | '.join(spreads)} | |")
        late_rewards = [late for rows in rows_of_runs if (late := late_training_reward(rows)) is not None]
        if not evaluated and late_rewards:
            lines.append(f"| **{label}, mean of {len(late_rewards)}** | {_with_spread(late_rewards)} | |")
    return "\n".join([*lines, *idle]) + "\n"


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(first, title=title, title_justify="left")
    for column in others:
        table.add_column(column, justify="right")
    return table


def _cells(before: float | None, after: float | None) -> list[str]:
    """The cells before, after and change, "-" for what is unknown."""
    change = None if before is None or after is None else after - before
    values = ((before, ""), (after, ""), (change, "+"))
    return ["-" if value is None else decimals(value, sign) for value, sign in values]


def _with_spread(values: Sequence[float], sign: str = "") -> str:
    return decimals(mean(values), sign) + (f" ± {decimals(stdev(values))}" if len(values) > 1 else "")


def _last_step(rows: Rows) -> int:
    return max((row["step"] for row in rows if row["kind"] == names.KIND_TRAIN), default=0)
