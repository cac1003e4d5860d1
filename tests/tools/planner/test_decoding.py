"""The schedule of an engine's decoding, against vLLM's scheduler and in cases with a known answer."""

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from openrlhf_gtpo.tools.planner.decoding import Stretch, decode
from tests.support import ROOT


def rollout(
    seed: int, rows: int, longest: int, prompt: int, samples: int, cache: int, most_rows: int
) -> dict[str, Any]:
    drawn = random.Random(seed)
    lengths = [drawn.randint(1, longest) for _ in range(rows)]
    return {"lengths": lengths, "prompt": prompt, "samples": samples, "cache_tokens": cache, "most_rows": most_rows}


ROLLOUTS = [
    rollout(0, rows=8, longest=30, prompt=5, samples=1, cache=1000, most_rows=64),  # room for all
    rollout(1, rows=8, longest=30, prompt=5, samples=1, cache=40, most_rows=64),  # room for one or two
    rollout(2, rows=40, longest=30, prompt=20, samples=4, cache=300, most_rows=64),
    rollout(3, rows=40, longest=30, prompt=20, samples=4, cache=300, most_rows=6),  # fewer rows than fit
    rollout(4, rows=100, longest=30, prompt=7, samples=5, cache=500, most_rows=64),
    rollout(5, rows=50, longest=200, prompt=64, samples=16, cache=2000, most_rows=1024),
    rollout(6, rows=31, longest=90, prompt=1, samples=7, cache=97, most_rows=31),
]


@pytest.mark.slow
def test_rows_of_every_step_are_those_of_vllm() -> None:
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR"}
    words = [sys.executable, "-W", "ignore", "-m", "tests.support.vllm_schedule_program", json.dumps(ROLLOUTS)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    recomputed = 0
    for one, vllm in zip(ROLLOUTS, json.loads(done.stdout.splitlines()[-1]), strict=True):
        stretches = list(decode(**one))
        assert [stretch.rows for stretch in stretches for _ in range(stretch.steps)] == vllm["rows"]
        # vLLM's cache may still hold some tokens of a row that waited.
        once = sum(one["lengths"]) + one["prompt"] * -(-len(one["lengths"]) // one["samples"])
        again = sum(sum(stretch.again) for stretch in stretches)
        assert 0 <= vllm["computed"] - once <= again
        recomputed += again
    assert recomputed > 1000


def test_with_room_for_all_the_batch_shrinks() -> None:
    assert list(decode([3, 1, 3], 10, 1, 1000, 8)) == [
        Stretch(steps=1, rows=3, context=10.5, again=()),
        Stretch(steps=2, rows=2, context=12, again=()),
    ]


def test_a_full_cache_preempts_the_last_row() -> None:
    """Two rows of 2 + 4 tokens in a cache of 9: both get two tokens; the second waits, then returns with its 2 + 2."""
    assert list(decode([4, 4], 2, 1, 9, 8)) == [
        Stretch(steps=2, rows=2, context=3, again=()),
        Stretch(steps=2, rows=1, context=5, again=()),
        Stretch(steps=2, rows=1, context=5, again=(4,)),
    ]


@pytest.mark.parametrize("one", ROLLOUTS)
def test_every_row_gets_its_tokens_and_the_cache_is_never_too_full(one: dict[str, Any]) -> None:
    stretches = list(decode(**one))
    assert sum(stretch.steps * stretch.rows for stretch in stretches) == sum(one["lengths"])
    for stretch in stretches:
        held = (stretch.context + stretch.steps / 2) * stretch.rows  # counts the prompt of siblings more than once
        shared = one["prompt"] * (stretch.rows - -(-stretch.rows // one["samples"]))
        assert stretch.steps > 0 and stretch.rows <= one["most_rows"] and held - shared <= one["cache_tokens"]
