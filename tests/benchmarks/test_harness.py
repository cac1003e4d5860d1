"""The harness: what is called when, what is counted, and what a table and a results file hold."""

import argparse
import errno
import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite.harness import Measured, SquareProduct, measure, median_and_range, print_table, spread
from openrlhf_gtpo.platform.results import write_results


def test_sides_take_turns_phase_by_phase_and_the_warm_up_is_not_counted() -> None:
    calls: list[str] = []
    sides = {name: {phase: partial(calls.append, name + phase) for phase in "12"} for name in "ab"}
    sides["c"] = {"2": partial(calls.append, "c2")}
    rounds: list[int] = []
    measured = measure(sides, repeat=3, warm_up=1, new_round=rounds.append, before_each=lambda: calls.append("-"))
    assert rounds == [0, 1, 2, 3]
    order = ["a1 b1 a2 b2 c2", "b1 a1 b2 c2 a2", "a1 b1 c2 a2 b2", "b1 a1 a2 c2 b2"]
    assert [call for call in calls if call != "-"] == " ".join(order).split() and calls[::2] == ["-"] * 20
    for name, one in measured.items():
        assert {phase: len(seconds) for phase, seconds in one.seconds.items()} == dict.fromkeys(sides[name], 3)
    assert all(second > 0 for one in measured.values() for seconds in one.seconds.values() for second in seconds)


def test_ratios_are_of_one_repetition() -> None:
    slow, fast = Measured({"x": [4.0, 6.0]}, {"tokens": 3}), Measured({"x": [2.0, 1.0], "y": [1.0]})
    assert slow.over(fast, "x") == [2, 6] and slow.over(fast, "y") == []
    assert slow.as_json() == {"seconds": {"x": [4.0, 6.0]}, "tokens": 3}
    assert spread([3, 1, 2]) == (1, 2, 3) and median_and_range([3, 1, 2]) == "2.00 (1.00 to 3.00)"


def test_a_product_of_n_by_n_matrices_is_2_n_cubed_operations() -> None:
    product = SquareProduct(4, torch.float32)
    assert product.flops == 10 * 2 * 4**3 and product.rate() > 0


def test_a_table_and_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("title", ("way", "ms"), (row for row in [("long name", "1"), ("b", "10.5")]), ["note [1]"])
    assert capsys.readouterr().out == "\ntitle\nway          ms\nlong name     1\nb          10.5\nnote [1]\n"
    path = tmp_path / "new" / "results.json"
    write_results(path, argparse.Namespace(command="x", repeat=2, output=path), {"cases": []})
    written = json.loads(path.read_text())
    assert written["settings"] == {"command": "x", "repeat": "2"} and written["cases"] == []
    assert set(written["machine"]) == {"processor", "cores", "gpus", "python", "versions"}


def test_a_file_that_cannot_be_written_again_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "results.json", Path.write_text
    write_results(path, argparse.Namespace(), {"cases": [1]})

    def full(file: Path, text: str, **kwargs: Any) -> None:
        write(file, text[: len(text) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        write_results(path, argparse.Namespace(), {"cases": [1, 2]})
    assert json.loads(path.read_text())["cases"] == [1]
