"""Runs configurations of the trainer in turns, a process each time, and puts what they took side by side."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from openrlhf_gtpo.benchmarks.rates import measured_rate
from openrlhf_gtpo.benchmarks.train_configurations import Configuration
from openrlhf_gtpo.benchmarks.trainer_process import TrainerFailed, run_trainer
from openrlhf_gtpo.report.step_phases import MissingMetrics, measured_steps, of_run


def measure(
    configurations: Sequence[Configuration],
    steps: int,
    warmup: int,
    repeat: int,
    matrix: int,
    folder: Path,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Run every configuration ``repeat`` times, in an order that turns round each time.

    Args:
        steps, warmup: of a run, counted and not; the first step starts engines' caches and compiles.
        matrix: side of the product that MFU is over, measured after every round.
        folder: for metrics and logs.
        tell: is told what happens.

    Returns:
        ``configurations``: name to ``flags``, ``setup``, and ``runs`` with the ``rows`` of metrics and what
        ``step_phases.of_run`` made of them; ``matrix``: ``side``, ``dtype``, and ``flops_per_second`` of each round, by
        number of GPUs.

    Raises:
        TrainerFailed: a run did not make its steps.
    """
    measured: dict[str, Any] = {
        one.name: {"flags": one.argv, "setup": asdict(one.setup), "runs": []} for one in configurations
    }
    rates: dict[int, list[float]] = {one.setup.gpus: [] for one in configurations}
    for repetition in range(repeat):
        for one in configurations if repetition % 2 == 0 else configurations[::-1]:
            name = f"{one.name}, run {repetition + 1} of {repeat}"
            tell(name)
            place = folder / f"{one.name}-{repetition + 1}"
            rows = run_trainer(name, one.argv, place, warmup + steps)
            try:
                counted = measured_steps(rows, warmup, steps)
            except MissingMetrics as error:
                raise TrainerFailed(f"{name}: {error}; the whole log: {place / 'train.log'}") from error
            measured[one.name]["runs"].append({"rows": counted, **of_run(counted, one.setup)})
        for gpus, rounds in rates.items():
            rounds.append(measured_rate(gpus, matrix, configurations[0].dtype))
    return {
        "configurations": measured,
        "matrix": {"side": matrix, "dtype": configurations[0].dtype, "flops_per_second": rates},
    }
