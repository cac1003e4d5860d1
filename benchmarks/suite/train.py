"""Real training steps by phase: the trainer itself, one process per run, with one configuration or several in turn."""

import argparse
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.suite import harness
from benchmarks.suite.harness import SquareProduct, measure, median_and_range, print_table
from benchmarks.suite.results import write_results
from benchmarks.suite.step_phases import COUNTED, IDLE, STEP, measured_steps, of_run, ratios, summary
from benchmarks.suite.train_configurations import Configuration, configurations, split_compare
from openrlhf_gtpo import platform
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.platform.processes import run_processes
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import phase_file, read_runs

COMMAND = (sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MATRIX = {"cuda": 8192, "cpu": 512}  # a core without AVX-512 reaches 0.7 GFLOP/s in bf16
_POLL_SECONDS = 0.5
_SECONDS_TO_END = 120  # time for Ray to end engines and actors
_LAST_LINES = 20


def run(args: argparse.Namespace) -> None:
    """Check every configuration, run them, and print, write and draw the results.

    Raises:
        UsageError: a configuration cannot work, or has a different workload from the first; raised before any run.
        TrainingStopped: a run did not complete its steps.
    """
    if len(args.compare) == 1:
        raise UsageError(f"--compare {args.compare[0]!r} is alone; give a second one, or put its flags behind --.")
    compare = split_compare(args.compare) or {"this": []}
    chosen = configurations(args.trainer_flags, compare, args.warmup + args.steps)
    folder = _new_folder(args.runs or Path("runs") / f"benchmark_train-{datetime.now():%Y%m%d-%H%M%S}")
    # SIGTERM ends the benchmark's trainer too, like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    results = measure_runs(chosen, args, folder)
    print_phases(results)
    write_results(args.output, args, results)
    if args.png:
        from benchmarks.suite.plots import plot_step_phases

        print(plot_step_phases(results, args.png))
    _tell(f"logs and metrics: {folder}")


def measure_runs(chosen: Sequence[Configuration], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run every configuration ``args.repeat`` times, with a different one first each time.

    Returns:
        ``configurations``: by name, ``flags``, ``setup``, and ``runs`` with the ``rows`` of metrics and the result of
        ``step_phases.of_run``; ``matrix``: ``side``, ``dtype`` and, by number of GPUs, ``flops_per_second`` of the
        product that MFU is relative to, measured after every round; ``summary`` and ``ratios`` of the runs.
    """
    side, dtype = args.matrix or _MATRIX[platform.detect()], chosen[0].dtype
    rates: dict[int, list[float]] = {config.setup.gpus: [] for config in chosen}
    runs: dict[str, list[dict[str, Any]]] = {config.name: [] for config in chosen}

    def train(config: Configuration) -> None:
        number = len(runs[config.name]) + 1
        name, place = f"{config.name}, run {number} of {args.repeat}", folder / f"{config.name}-{number}"
        _tell(name)
        rows = run_trainer(name, config.argv, place, args.warmup + args.steps)
        try:
            counted = measured_steps(rows, args.warmup, args.steps)
        except ValueError as error:
            raise TrainingStopped(f"{name}: {error}; the whole log: {place / 'train.log'}") from error
        runs[config.name].append({"rows": counted, **of_run(counted, config.setup)})

    def multiply() -> None:
        for gpus, rounds in rates.items():
            rounds.append(measured_rate(gpus, side, dtype))
        write_results(args.output, args, {"runs": runs, "flops_per_second": rates})  # in case a later round fails

    sides: dict[str, Any] = {config.name: {"train": partial(train, config)} for config in chosen}
    measure(sides | {"": {"product": multiply}}, args.repeat, warm_up=0)
    medians = {gpus: statistics.median(rounds) for gpus, rounds in rates.items()}
    return {
        "configurations": {
            config.name: {"flags": config.argv, "setup": asdict(config.setup), "runs": runs[config.name]}
            for config in chosen
        },
        "matrix": {"side": side, "dtype": dtype, "flops_per_second": rates},
        "summary": {config.name: summary(runs[config.name], medians[config.setup.gpus]) for config in chosen},
        "ratios": {config.name: ratios(runs[chosen[0].name], runs[config.name]) for config in chosen[1:]},
    }


def run_trainer(name: str, argv: Sequence[str], folder: Path, steps: int) -> list[dict[str, Any]]:
    """Train with ``argv`` for ``steps`` steps, without evaluating or saving anything; return the lines of metrics.

    Args:
        name: the run's name, for messages.
        argv: the trainer's flags.
        folder: a new one, for ``metrics.jsonl`` and ``train.log``; every node of a cluster must see it.
        steps: number of steps after which the trainer is ended. It leaves no model or checkpoint.

    Raises:
        TrainingStopped: the trainer ended after fewer steps. The message has its last lines and the path of its log.
    """
    folder.mkdir(parents=True)
    metrics, log = folder / "metrics.jsonl", folder / "train.log"
    weights = {"--ckpt.path": folder / "checkpoints", "--ckpt.output_dir": folder / "model"}
    overrides = {"--logger.metrics_path": metrics, **weights, "--ckpt.save_steps": -1, "--eval.steps": -1}
    command = [*COMMAND, *(word for word in argv if word != "--eval.before_training")]
    command += [str(word) for pair in overrides.items() for word in pair]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while True:
                ended = process.poll() is not None  # before reading, so that the last line is read too
                try:
                    rows = read_runs(metrics)[-1]
                except ValueError:  # missing, or without a complete line yet
                    rows = []
                num_steps = sum(row["kind"] == names.KIND_TRAIN for row in rows)
                if num_steps >= steps:
                    return rows
                if ended:
                    guess = "its data may be used up" if rows else f"{folder} must be a folder that every node sees"
                    guess = "" if process.returncode else f" ({guess})"
                    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                    last_words = [line for line in lines if line.startswith("train_ppo_ray")] or lines[-_LAST_LINES:]
                    raise TrainingStopped(
                        f"{name} ended with exit code {process.returncode} after {num_steps} of {steps} steps; the "
                        f"whole log: {log}{guess}. Its last lines:\n" + "\n".join(f"  {line}" for line in last_words)
                    )
                time.sleep(_POLL_SECONDS)
        finally:
            process.terminate()
            try:
                process.wait(_SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for place in weights.values():  # left by a run that ended by itself or stopped on request
                shutil.rmtree(place, ignore_errors=True)
            phase_file(metrics).unlink(missing_ok=True)  # left by a run that was killed


def measured_rate(gpus: int, side: int, dtype: str) -> float:
    """Measure the FLOP/s of all ``gpus`` with products of (side, side) matrices of ``dtype`` ("bf16" or "fp16").

    GPUs are assumed to be equal, so one is measured. On a CPU host, the processes that replace GPUs share its cores
    and are measured together. Nothing else may use them. With RAY_ADDRESS the measurement runs on the cluster,
    otherwise on this host.
    """
    measured = 1 if platform.detect() == "cuda" else gpus
    if os.environ.get("RAY_ADDRESS"):
        rate = _rate_on_cluster(measured, side, dtype)
    else:
        rate = run_processes(_rate_of_all, measured, side, dtype)
    return rate * gpus / measured


def _rate_of_all(side: int, dtype: str) -> float:
    """Sum the rates of all ranks of the default group, measured at the same time."""
    product = SquareProduct(side, DTYPES[dtype])
    torch.distributed.barrier()
    rates: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(rates, product.rate())
    return sum(rates)


def _rate_on_cluster(processes: int, side: int, dtype: str) -> float:
    import ray

    ray.cloudpickle.register_pickle_by_value(harness)  # a node of the cluster may have only the package
    ray.init()
    try:
        product = ray.remote(num_gpus=1)(SquareProduct)
        products = [product.remote(side, DTYPES[dtype]) for _ in range(processes)]
        ray.get([actor.__ray_ready__.remote() for actor in products])
        return sum(ray.get([actor.rate.remote() for actor in products]))
    finally:
        ray.shutdown()


def _new_folder(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"--runs {path} already has files; give a new folder.")
    except OSError as error:
        raise UsageError(f"--runs {path} cannot be created: {error.strerror}.") from error
    return path.resolve()


def print_phases(results: Mapping[str, Any]) -> None:
    """Print ``results``: a table for each configuration, and one of the ratios."""
    for name, measured in results["configurations"].items():
        setup, runs, medians = measured["setup"], measured["runs"], results["summary"][name]
        peaks = (f"{k.replace('/', ' in ').replace('_', ' ')} {v:.2f}" for k, v in medians["peak_memory_gib"].items())
        print_table(
            f"{name}: {setup['gpus']} GPUs, {len(runs)} runs of {len(runs[0]['rows'])} steps, medians of the runs",
            ("phase", "seconds", "share", "tokens/s/GPU", "MFU", "precision", "tokens are"),
            list(_phase_rows(setup, medians)),
            [f"peak memory of a process, GiB: {', '.join(peaks) or 'not known here'}"],
        )
    if results["ratios"]:
        rows = []
        for phase in COUNTED:
            cells = [by_phase.get(phase) for by_phase in results["ratios"].values()]
            if any(cells):
                texts = ("-" if cell is None else median_and_range(cell) for cell in cells)
                rows.append((phase.replace("_", " "), *texts))
        base = next(iter(results["configurations"]))
        title = f"tokens/s/GPU, times {base}'s: median (lowest to highest)"
        print_table(title, ("phase", *results["ratios"]), rows)
    product = results["matrix"]
    for gpus, rounds in product["flops_per_second"].items():
        print(
            f"MFU is over the {product['dtype']} product of {product['side']} x {product['side']} matrices on {gpus} "
            f"GPUs or the processes that replace them: {min(rounds) / 1e12:.3g} to {max(rounds) / 1e12:.3g} TFLOP/s."
        )


def _phase_rows(setup: Mapping[str, Any], medians: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for phase, numbers in medians["phases"].items():
        if phase == STEP:
            idle = medians[IDLE]
            gpu_time = f"GPU time idle: {idle['gpu_share']:.1%}"
            yield "idle (in no phase)", _seconds(idle["seconds"]), f"{idle['share']:.1%}", "", "", "", gpu_time
        speed, mfu = numbers["tokens_per_second_per_gpu"], numbers["mfu"]
        yield (
            phase.replace("_", " "),
            _seconds(numbers["seconds"]),
            f"{numbers['share']:.1%}",
            "-" if speed is None else f"{speed:,.0f}",
            f"{mfu:.1%}" if mfu else "-",
            setup["precision"].get(phase, ""),
            COUNTED[phase],
        )


def _seconds(value: float) -> str:
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def _tell(text: str) -> None:
    print(f"[benchmark train] {text}", file=sys.stderr, flush=True)
