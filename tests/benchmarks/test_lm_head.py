"""``benchmark lm-head``: every way gives the same numbers, sharded or not, and each ratio is within one repetition."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import lm_head
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.errors import UsageError


@pytest.mark.slow
def test_every_way_gives_the_same_numbers(tmp_path: Path) -> None:
    output, plot = tmp_path / "made" / "lm_head.json", tmp_path / "made" / "lm_head.png"
    words = "lm-head --shape 40x32x1000 --dtype float32 --tensor-parallel 1 2 --repeat 2"
    assert benchmark.main([*words.split(), "--output", str(output), "--png", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    written = json.loads(output.read_text())
    assert written["machine"]["versions"]["torch"] and written["settings"]["repeat"] == "2"
    one, two = written["cases"]
    assert [case["tensor_parallel"] for case in (one, two)] == [1, 2]
    assert {"product", "openrlhf", "openrlhf_gtpo"} <= one["measured"].keys()
    assert two["absent"]["openrlhf"] == "does not support tensor parallelism"
    for case in (one, two):
        for name, way in case["measured"].items():
            for phase in ("forward", "forward_backward"):
                seconds, base = (case["measured"][n]["seconds"][phase] for n in (name, "product"))
                assert case["over_product"][name][phase] == pytest.approx([a / b for a, b in zip(seconds, base)])
            if name != "product":
                assert way["log_prob_error"] < 1e-4
            if way["entropy_error"] is not None:
                assert way["entropy_error"] < 1e-4 and math.isfinite(way["entropy_error"])


def out_of_memory(problem: Any) -> None:
    if len(problem.hidden) > 8:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")


def test_others_are_measured_without_the_product(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If only the product is out of memory, there is nothing to compare with."""
    ways = lm_head.ways
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(lm_head, "run_processes", lambda function, ranks, *args: function(*args))

    def without_product(**kind: bool) -> Any:
        found, absent = ways(**kind)
        ours = (lm_head.OURS, lm_head.OURS_WITHOUT_ENTROPY)
        return {lm_head.PRODUCT: (out_of_memory,) * 2, **{name: found[name] for name in ours}}, absent

    monkeypatch.setattr(lm_head, "ways", without_product)
    words = ["lm-head", "--shape", "40x32x100", "--dtype", "float32", "--repeat", "2"]
    assert benchmark.main([*words, "--png", str(tmp_path / "plot.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    product, ours = (line.split() for line in lines if line.startswith(("product ", "openrlhf_gtpo ")))
    assert product == ["product", "no", "memory", "no", "memory"] and ours[2] == ours[5] == "?"


def test_a_rank_without_memory_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for it in the middle of a way."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(lm_head, "ways", lambda **_: ({lm_head.PRODUCT: (out_of_memory,) * 2}, {}))
    shape = {"tokens": 40, "width": 32, "vocabulary": 100, "dtype": "float32"}
    with pytest.raises(UsageError, match="product on 2 processes: out of memory: CUDA out of memory. Tried to"):
        lm_head.measure_ways(shape, 1, 1)


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--shape 10x20", "Expected --shape TOKENSxHIDDENxVOCABULARY, such as 1024x896x151936, got 10x20."),
        ("--shape 0x20x30", "Expected --shape TOKENSxHIDDENxVOCABULARY"),
        ("--shape 4x4x9 --tensor-parallel 2", "--tensor-parallel 2 does not divide every vocabulary of --shape."),
        ("--repeat 0", "Expected --repeat >= 1, got 0."),
        ("--repeat 99999999999", "Expected --repeat <= 2147483647, got 99999999999."),
        ("--output .", "--output . cannot be written, because of ."),
        ("--png .", "--png . cannot be written, because of ."),
        ("--tensor-parallel 1 0", "Expected --tensor-parallel >= 1, got 0."),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["lm-head", *words.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("benchmark lm-head: ") and sentence in message and message.count("\n") == 1
