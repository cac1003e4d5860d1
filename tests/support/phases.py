"""Checks that hold for the phases of real training steps, whoever ran them."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from benchmarks.suite.step_phases import PHASES, STEP, Setup, of_run
from openrlhf_gtpo.report import names

# An actor and an engine on a GPU each, which take turns except in the weight sync.
SPLIT = Setup(
    gpus=2,
    busy={"rollout": 1, "old_log_probs": 1, "shaping": 0, "train": 1, "weight_sync": 2},
    passes={"rollout": 1, "old_log_probs": 1, "train": 3},
    epochs=1,
    precision={"rollout": "bf16", "old_log_probs": "bf16", "train": "bf16"},
)


def check_phases(rows: Sequence[Mapping[str, Any]], setup: Setup = SPLIT) -> dict[str, Any]:
    """Check that phases do not overlap or leave the step, tokens are the phase's, and every process reports memory.

    Args:
        rows: metrics of steps.
        setup: what the phases' numbers depend on; its arithmetic is checked for any placement.

    Returns:
        The result of ``of_run``.
    """
    run = of_run(rows, setup)
    phases = run["phases"]
    step = phases[STEP]
    parts = {phase: phases[phase]["seconds"] for phase in PHASES}
    assert all(seconds > 0 for seconds in parts.values())
    assert sum(parts.values()) + run["idle"]["seconds"] == pytest.approx(step["seconds"])
    assert 0 <= run["idle"]["share"] < 0.5, "a phase is counted twice, or most of the step is in none"
    scored, shaped, both = map(names.timing, (names.OLD_LOG_PROBS, names.ADVANTAGES, names.MAKE_EXPERIENCE))
    for row in rows:
        assert row[scored] + row[shaped] <= row[both]
    for one in phases.values():
        assert one["tokens"] > 0
        assert one["tokens_per_second_per_gpu"] * one["seconds"] * setup.gpus == pytest.approx(one["tokens"])
    assert phases["train"]["tokens"] == phases["old_log_probs"]["tokens"] == step["tokens"]
    assert phases["rollout"]["tokens"] < step["tokens"]
    assert phases["train"]["flops"] == 3 * phases["rollout"]["flops"] > 0
    working = sum(seconds * setup.busy[phase] for phase, seconds in parts.items())
    assert run["idle"]["gpu_share"] == pytest.approx(1 - working / (setup.gpus * step["seconds"]))
    for process in ("actor/old_log_probs", "actor/ppo_train", "actor/broadcast", "engine/generation"):
        assert 0.01 < run["peak_memory_gib"][process] < 24, process
    return run
