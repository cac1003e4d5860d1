import json
import math
import os
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest

from openrlhf_gtpo.report.metrics import MetricsWriter, before_and_after, held_out_names, read_runs, series


def _write(path, *lines):
    with closing(MetricsWriter(path)) as writer:
        for kind, step, metrics in lines:
            writer.write(kind, step, metrics)
    return path


def test_what_is_written_is_read(tmp_path):
    path = _write(
        tmp_path / "deep" / "metrics.jsonl",
        ("run", 0, {"seed": 3, "estimator": "gtpo"}),
        ("train", 1, {"reward/mean": 0.25, "groups/total": 4}),
    )
    run, train = read_runs(path)[-1]
    assert (run["seed"], run["estimator"]) == (3, "gtpo")
    assert (train["kind"], train["step"], train["reward/mean"], train["groups/total"]) == ("train", 1, 0.25, 4)
    assert train["time"] > 1e9
    assert read_runs(path.parent)[-1] == [run, train]


# Its file cannot grow beyond 9000 bytes, as on a full disk, until the last step.
FULL = """
import resource, signal, sys
from openrlhf_gtpo.report.metrics import MetricsWriter

writer = MetricsWriter(sys.argv[1])
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for limit, steps in ((9000, range(1, 60)), (resource.RLIM_INFINITY, [60])):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for step in steps:
        writer.phase("x" * 9001)
        writer.write("train", step, {"sample": 900 * "x"})
"""


def test_lines_wait_for_a_full_disk(tmp_path):
    path = tmp_path / "m.jsonl"
    ended = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True)
    assert not ended.stderr and f"Warning: {path} could not be written (File too large)" in ended.stdout
    assert [row["step"] for row in read_runs(path)[-1]] == list(range(1, 61))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_is_not_a_number_is_null_and_is_not_plotted(tmp_path, value):
    path = _write(tmp_path / "m.jsonl", ("train", 1, {"a": value}), ("train", 2, {"a": 1.0}))
    assert json.loads(path.read_text().splitlines()[0])["a"] is None
    assert series(read_runs(path)[-1], "train", "a") == ([2], [1.0])


def test_a_line_cut_off_by_a_kill_is_left_out_and_costs_a_resumed_run_nothing(tmp_path):
    path = _write(tmp_path / "m.jsonl", ("train", 1, {"a": 1}), ("train", 2, {"a": 2}))
    os.truncate(path, path.stat().st_size - 5)
    assert [row["step"] for row in read_runs(path)[-1]] == [1]
    _write(path, ("train", 2, {"a": 20}), ("train", 3, {"a": 3}))
    assert series(read_runs(path)[-1], "train", "a") == ([1, 2, 3], [1, 20, 3])


def test_a_repeated_step_counts_once_with_its_later_line(tmp_path):
    path = _write(tmp_path / "m.jsonl", ("train", 2, {"a": 1, "b": 1}), ("eval", 2, {"a": 5}), ("train", 2, {"a": 2}))
    rows = read_runs(path)[-1]
    assert [(row["kind"], row["a"]) for row in rows] == [("train", 2)], "the evaluation was of other weights"
    assert series(rows, "train", "b") == ([], [])


def _start(path, *steps, after=0):
    """One start of the trainer: its first line, and a line for each step whose metric ``a`` is the step's number."""
    with closing(MetricsWriter(path)) as writer:
        writer.begin(after, {"seed": 1})
        for step in steps:
            writer.write("train", step, {"a": step})


def test_runs_in_one_file_stay_apart_and_a_resumed_one_stays_one(tmp_path):
    path = tmp_path / "m.jsonl"
    _start(path, 1, 2, 3)
    _start(path, 3, 4, after=2)
    _start(path, 1, 2)
    first, second = read_runs(path)
    assert series(first, "train", "a")[0] == [1, 2, 3, 4] and series(second, "train", "a")[0] == [1, 2]
    ids = [{row["run"] for row in run if row["kind"] == "run"} for run in (first, second)]
    assert [len(found) for found in ids] == [1, 1] and ids[0] != ids[1]


def test_steps_that_a_resumed_run_has_not_made_again_are_not_its_own(tmp_path):
    """The run ended after 5 steps with an evaluation; then it went on from step 2, and was killed after step 4.
    A start that made no step before that, and one from the end, have undone nothing."""
    path = tmp_path / "m.jsonl"
    _start(path, 1, 2, 3, 4, 5)
    _write(path, ("eval", 5, {"b": 1}), ("run", 5, {"run": "x", "ended": True}))
    _start(path, after=2)
    _start(path, after=2)
    _start(path, after=5)
    assert series(read_runs(path)[-1], "train", "a")[0] == [1, 2, 3, 4, 5]
    _start(path, after=2)
    for made in ([], [30, 40]):
        _write(path, *(("train", step, {"a": a}) for step, a in enumerate(made, start=3)))
        (rows,) = read_runs(path)
        assert series(rows, "train", "a") == ([1, 2, 3, 4][: 2 + len(made)], [1, 2, *made])
        assert series(rows, "eval", "b") == ([], []) and not any("ended" in row for row in rows)
        assert [row["step"] for row in rows if row["kind"] == "run"] == [0, 2]


@pytest.mark.parametrize("evaluated", [True, False])
def test_runs_of_version_0_1_stay_apart(tmp_path, evaluated):
    """Such runs do not begin with a line of kind run: five good steps, then two bad ones from another start."""
    before = [("eval", 0, {"b": 0.5})] if evaluated else []
    steps = [*before, *(("train", step, {"a": 0.9}) for step in range(1, 6))]
    steps += [*before, *(("train", step, {"a": 0.1}) for step in range(1, 3))]
    first, second = read_runs(_write(tmp_path / "m.jsonl", *steps))
    assert series(first, "train", "a")[1] == [0.9] * 5 and series(second, "train", "a")[1] == [0.1] * 2
    assert len(series(second, "eval", "b")[0]) == evaluated


def test_held_out_reward_before_and_after(tmp_path):
    name = "eval_products_pass1"
    rows = [{"kind": "eval", "step": step, name: value} for step, value in ((0, 0.2), (4, 0.3), (8, 0.5))]
    assert held_out_names(rows) == [name]
    assert before_and_after(rows, name) == (0.2, 0.5)
    assert before_and_after(rows[1:], name) == (None, 0.5)
    assert before_and_after(rows[:1], name) == (0.2, None)
