"""What ``benchmark train`` measured, as text: a table of each configuration, and of the ratios. Must not know torch."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from openrlhf_gtpo.report.step_phases import COUNTED, IDLE, STEP


def print_step_phases(results: Mapping[str, Any], console: Console | None = None) -> None:
    """Print ``results``, what ``benchmark train --output`` writes."""
    console = console or _console()
    for name, measured in results["configurations"].items():
        setup, runs = measured["setup"], measured["runs"]
        console.print(
            f"\n{name}: {setup['gpus']} GPUs, {len(runs)} runs of {len(runs[0]['rows'])} steps, medians of the runs",
            highlight=False,
        )
        console.print(_phases(setup, results["summary"][name]))
        console.print(_memory(results["summary"][name]["peak_memory_gib"]), highlight=False, soft_wrap=True)
    if results["ratios"]:
        base = next(iter(results["configurations"]))
        console.print(f"\ntokens/s/GPU, times {base}'s: median (lowest to highest)", highlight=False)
        console.print(_ratios(results))
    product = results["matrix"]
    for gpus, rounds in product["flops_per_second"].items():
        console.print(
            f"MFU is over the {product['dtype']} product of {product['side']} x {product['side']} matrices on {gpus} GPUs or "
            f"the processes that stand for them: {min(rounds) / 1e12:.3g} to {max(rounds) / 1e12:.3g} TFLOP/s.",
            highlight=False,
            soft_wrap=True,
        )


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=160)  # a file is not 80 columns wide


def _phases(setup: Mapping[str, Any], medians: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("phase")
    for column in ("seconds", "share", "tokens/s/GPU", "MFU"):
        table.add_column(column, justify="right")
    table.add_column("precision")
    table.add_column("tokens are")
    for phase, numbers in medians["phases"].items():
        if phase == STEP:
            idle = medians[IDLE]
            seconds, share = _seconds(idle["seconds"]), f"{idle['share']:.1%}"
            table.add_row("idle (in no phase)", seconds, share, "", "", "", f"GPU time idle: {idle['gpu_share']:.1%}")
            table.add_section()
        speed, mfu = numbers["tokens_per_second_per_gpu"], numbers["mfu"]
        table.add_row(
            phase.replace("_", " "),
            _seconds(numbers["seconds"]),
            f"{numbers['share']:.1%}",
            "-" if speed is None else f"{speed:,.0f}",
            f"{mfu:.1%}" if mfu else "-",
            setup["precision"].get(phase, ""),
            COUNTED[phase],
        )
    return table


def _seconds(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _memory(peaks: Mapping[str, float]) -> str:
    cells = (f"{name.replace('/', ' in ').replace('_', ' ')} {size:.2f}" for name, size in peaks.items())
    return f"peak memory of a process, GiB: {', '.join(cells) or 'not known here'}"


def _ratios(results: Mapping[str, Any]) -> Table:
    table = Table()
    table.add_column("phase")
    for name in results["ratios"]:
        table.add_column(name, justify="right")
    for phase in COUNTED:
        cells = [ratios.get(phase) for ratios in results["ratios"].values()]
        if any(cells):
            table.add_row(
                phase.replace("_", " "),
                *("-" if cell is None else f"{cell[1]:.2f} ({cell[0]:.2f} to {cell[2]:.2f})" for cell in cells),
            )
    return table
