"""Where the time of training steps went, from a run's metrics: seconds, tokens/s/GPU, shares, MFU, idle time, memory.

Arithmetic on the trainer's metrics. Must not import torch.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows, is_number

STEP, IDLE = "step", "idle"

_RESPONSE = "response tokens"
_SAMPLED = "sampled tokens"  # a replay and older files have only response tokens
_ALL = "prompt and response tokens"
_PASSES = "prompt and response tokens, in every epoch"

# The parts of a step: the metric with their seconds, and the tokens (without padding) of their tokens/s.
PHASES = {
    "rollout": (names.timing(names.GENERATION), _SAMPLED),
    "old_log_probs": (names.timing(names.OLD_LOG_PROBS), _ALL),
    "shaping": (names.timing(names.ADVANTAGES), _RESPONSE),
    "train": (names.timing(names.PPO_TRAIN), _PASSES),
    "weight_sync": (names.timing(names.BROADCAST), _ALL),
}
COUNTED = {name: counted for name, (_, counted) in PHASES.items()} | {STEP: _ALL}


@dataclass(frozen=True)
class Setup:
    """What the numbers of a configuration depend on.

    Fields:
        gpus: GPUs of the run; on a CPU host, the processes that replace them.
        busy: by phase, how many of them work in it.
        passes: by phase, its floating-point operations in forward passes of the policy. A backward pass counts as two;
            recomputed activations add nothing.
        epochs: passes of training over a rollout.
        precision: by phase, the number format of its matrix products.
    """

    gpus: int
    busy: Mapping[str, int]
    passes: Mapping[str, float]
    epochs: int
    precision: Mapping[str, str]


def measured_steps(rows: Rows, warmup: int, steps: int) -> list[Mapping[str, Any]]:
    """Return the ``steps`` training steps after the first ``warmup`` ones.

    Raises:
        ValueError: there are fewer steps, or one lacks a metric.
    """
    made = [row for row in rows if row["kind"] == names.KIND_TRAIN]
    if len(made) < warmup + steps:
        raise ValueError(f"it made {len(made)} of {warmup + steps} steps")
    required = [names.TIMING_STEP_WALL, names.TOKENS_PROMPT, names.TOKENS_RESPONSE]
    required += [timing for timing, _ in PHASES.values()]
    measured = made[warmup : warmup + steps]
    for row in measured:
        for name in required:
            if not is_number(row.get(name)):
                raise ValueError(f"step {row['step']} has no {name}")
    return measured


def of_run(rows: Rows, setup: Setup) -> dict[str, Any]:
    """Compute the phases of one run's measured steps (see :func:`measured_steps`).

    Returns:
        ``phases``: for each phase and the whole ``step``, ``seconds`` and ``tokens`` of a step (means), ``share`` of
        the step, ``tokens_per_second_per_gpu``, and ``flops`` of a step, None if the model's are unknown. With
        ``--train.async_enable``, ``rollout`` has the engines' seconds, which overlap with other phases.
        ``idle``: ``seconds`` and ``share`` of a step outside any phase, and ``gpu_share``, the share of the GPUs' time
        without a phase. ``peak_memory_gib``: ``process/phase`` to the maximum over steps.
    """
    step_seconds = _mean(rows, names.TIMING_STEP_WALL)
    prompt, response = _mean(rows, names.TOKENS_PROMPT), _mean(rows, names.TOKENS_RESPONSE)
    counts_sampled = all(is_number(row.get(names.TOKENS_SAMPLED)) for row in rows)
    sampled = _mean(rows, names.TOKENS_SAMPLED) if counts_sampled else response
    both = prompt + response
    tokens = {_RESPONSE: response, _SAMPLED: sampled, _ALL: both, _PASSES: setup.epochs * both}
    rollouts = setup.passes.get("rollout", 0) * (sampled / response if response else 1)
    passes = {**setup.passes, "rollout": rollouts}
    known = all(is_number(row.get(names.FLOPS_FORWARD)) for row in rows)
    forward = _mean(rows, names.FLOPS_FORWARD) if known else None

    def numbers(seconds: float, handled: float, passes: float) -> dict[str, Any]:
        return {
            "seconds": seconds,
            "share": seconds / step_seconds,
            "tokens": handled,
            "tokens_per_second_per_gpu": handled / seconds / setup.gpus if seconds and handled else None,
            "flops": None if forward is None else passes * forward,
        }

    # Log-probs without a forward pass (0 passes) have no tokens.
    handled = {name: tokens[counted] * (setup.passes.get(name) != 0) for name, (_, counted) in PHASES.items()}
    phases = {
        name: numbers(_mean(rows, timing), handled[name], passes.get(name, 0)) for name, (timing, _) in PHASES.items()
    }
    idle = step_seconds - sum(phase["seconds"] for phase in phases.values())
    if all(is_number(row.get(names.TIMING_ROLLOUT)) for row in rows):  # sampled during the previous step
        phases["rollout"] = numbers(_mean(rows, names.TIMING_ROLLOUT), handled["rollout"], passes.get("rollout", 0))
    working = sum(phase["seconds"] * setup.busy.get(name, 0) for name, phase in phases.items())
    phases[STEP] = numbers(step_seconds, tokens[_ALL], sum(passes.values()))
    return {
        "phases": phases,
        IDLE: {"seconds": idle, "share": idle / step_seconds, "gpu_share": 1 - working / (step_seconds * setup.gpus)},
        "peak_memory_gib": _peaks(rows),
    }


def summary(runs: Sequence[Mapping[str, Any]], flops_per_second: float | None) -> dict[str, Any]:
    """Compute medians over the runs of one configuration, in the format of :func:`of_run`, plus ``mfu`` of each phase.

    Args:
        runs: results of :func:`of_run`.
        flops_per_second: rate of a large matrix product, over all GPUs of a run; None for no MFU.
    """

    def medians(parts: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        by_key = {}
        for key in parts[0]:
            values = [part[key] for part in parts]
            by_key[key] = statistics.median(values) if all(is_number(value) for value in values) else None
        return by_key

    def with_mfu(phase: Mapping[str, Any]) -> dict[str, Any]:
        known = flops_per_second and phase["flops"] and phase["seconds"]
        return {**phase, "mfu": phase["flops"] / phase["seconds"] / flops_per_second if known else None}

    first = runs[0]
    peaks = [run["peak_memory_gib"] for run in runs]  # a failed audit makes the actor work in that run
    return {
        "phases": {name: medians([with_mfu(run["phases"][name]) for run in runs]) for name in first["phases"]},
        IDLE: medians([run[IDLE] for run in runs]),
        "peak_memory_gib": {key: max(peak[key] for peak in peaks if key in peak) for key in set().union(*peaks)},
    }


def ratios(base: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Compute the speed of ``other`` relative to ``base``: tokens/s/GPU of each phase and of the step.

    Both have one run per round, in order. A value is (lowest, median, highest) over the rounds.
    """
    by_phase = {}
    for phase in (*PHASES, STEP):
        speeds = [[run["phases"][phase]["tokens_per_second_per_gpu"] for run in runs] for runs in (other, base)]
        pairs = list(zip(*speeds, strict=True))
        if all(fast and slow for fast, slow in pairs):
            times = [fast / slow for fast, slow in pairs]
            by_phase[phase] = min(times), statistics.median(times), max(times)
    return by_phase


def _mean(rows: Rows, name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _peaks(rows: Rows) -> dict[str, float]:
    prefix = names.PEAK_MEMORY_PREFIX
    recorded = sorted({name for row in rows for name in row if name.startswith(prefix)})
    return {name[len(prefix) :]: max(row[name] for row in rows if name in row) for name in recorded}
