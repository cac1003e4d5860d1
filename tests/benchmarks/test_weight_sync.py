"""``benchmark weight-sync``: every way is timed, and the bytes are those of the parameters."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.suite.weight_sync import llama_parameters, parameters_of
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.errors import UsageError


@pytest.mark.slow
def test_every_way_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "made" / "weight_sync.json"
    words = "weight-sync --receiver process --shape 2x64x96x200 --bucket-mb 0 1 --repeat 2"
    assert benchmark.main([*words.split(), "--output", str(output)]) == 0
    written = json.loads(output.read_text())
    assert written["parameters"] == 2 * 9 + 3
    elements = 2 * (64 * 64 * 2 + 64 * 16 * 2 + 3 * 64 * 96 + 2 * 64) + 64 + 2 * 200 * 64
    assert written["bytes"] == 2 * elements
    ways = [(case["transport"], case["bucket_mb"], case["checksum"]) for case in written["cases"]]
    assert set(ways) == {(t, *way) for t in ("broadcast", "colocated") for way in ((0, False), (1, False), (1, True))}
    for seconds in (written["copy_seconds"], *(case["seconds"] for case in written["cases"])):
        assert len(seconds) == 2 and all(math.isfinite(one) and one > 0 for one in seconds)


def test_shapes_come_from_the_headers_of_safetensors(tmp_path: Path) -> None:
    save_file({"b": torch.zeros(3, 4)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": torch.zeros(5), "c": torch.zeros(())}, tmp_path / "model-00001-of-00002.safetensors")
    found = {p.name: p.shape for p in parameters_of(tmp_path)}
    assert found == {"a": (5,), "b": (3, 4), "c": ()}


def test_weights_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(5)}, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 90)
    with pytest.raises(UsageError, match="model.safetensors cannot be read"):
        parameters_of(tmp_path)


def test_the_shape_of_an_8b_llama() -> None:
    assert sum(math.prod(p.shape) for p in llama_parameters(32, 4096, 14336, 128256)) == 8_030_261_248  # Llama 3.1 8B


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("", "Give --model or --shape."),
        ("--model x --shape 1x1x1x1", "Expected either --model or --shape, got both."),
        ("--shape 1x1x1x1", "--shape has no weights for vLLM to load; give --receiver process, or --model."),
        ("--shape 12 --receiver process", "Expected --shape LAYERSxHIDDENxFFNxVOCABULARY"),
        ("--model /nowhere --receiver process", "--model /nowhere has no *.safetensors."),
        ("--model x --repeat 0", "Expected --repeat >= 1, got 0."),
        ("--model x --workers 0", "Expected --workers >= 1, got 0."),
        ("--model x --bucket-mb 4 -1", "Expected --bucket-mb >= 0, got -1."),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["weight-sync", *words.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("benchmark weight-sync: ") and sentence in message and message.count("\n") == 1
