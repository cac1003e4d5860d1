"""``benchmark lm-head``: every way gives the same numbers, sharded or not, and each ratio is within one repetition."""

import json
import math
from pathlib import Path

import pytest

from openrlhf_gtpo.cli import benchmark


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


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--shape 10x20", "Expected --shape TOKENSxHIDDENxVOCABULARY, such as 1024x896x151936, got 10x20."),
        ("--shape 0x20x30", "Expected --shape TOKENSxHIDDENxVOCABULARY"),
        ("--shape 4x4x9 --tensor-parallel 2", "--tensor-parallel 2 does not divide every vocabulary of --shape."),
        ("--repeat 0", "Expected --repeat >= 1, got 0."),
        ("--repeat 99999999999", "Expected --repeat <= 2147483647, got 99999999999."),
        ("--output .", "--output . is a folder; name a file in it."),
        ("--png .", "--png . is a folder; name a file in it."),
        ("--tensor-parallel 1 0", "Expected --tensor-parallel >= 1, got 0."),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["lm-head", *words.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("benchmark lm-head: ") and sentence in message and message.count("\n") == 1
