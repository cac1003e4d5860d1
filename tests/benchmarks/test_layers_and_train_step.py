"""``benchmark layers`` and ``train-step``: operations are counted by hand, ratios are on the same batches, and what
the GPU suite runs needs neither OpenRLHF nor Ray, vLLM or DeepSpeed.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.suite import train_step
from benchmarks.suite.harness import Measured
from benchmarks.suite.synthetic import BF16, even_lengths, fp8_options, precisions, read_shape
from benchmarks.suite.train_step import Step, derived, first_fit
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.model_shape import PRESETS, ModelShape, decoder_flops
from openrlhf_gtpo.platform.processes import ProcessFailed
from tests.startup import sitecustomize

# Makes a Python that has none of these packages, however it is started: only its path finder knows where they are. It
# comes before the tests' own sitecustomize on the path, and includes it.
WITHOUT = Path(sitecustomize.__file__).read_text() + """
from importlib.machinery import PathFinder
ABSENT = {"openrlhf", "ray", "vllm", "deepspeed"}
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in ABSENT else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""
# The first commands are told that they are a launch of one process, so they start none of their own; train-step, which
# takes a process for each precision, starts its own.
ALONE = """
import os, socket, sys
from openrlhf_gtpo.cli import benchmark
if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    launch = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= launch
    for words in sys.argv[1:]:
        if words.startswith("train-step"):
            for name in launch:
                del os.environ[name]
        assert benchmark.main(words.split()) == 0, words
        assert "weight-sync" not in words or "transformers" not in sys.modules
"""
COMMANDS = (
    "weight-sync --receiver process --transport colocated --shape 2x32x64x128 --bucket-mb 1 --repeat 1",
    "lm-head --shape 16x32x64 --repeat 1",
    "layers --shape tiny --tokens 128 --sequence-length 64 --micro-batches 2 --repeat 2 --matrix 128 "
    "--recipes delayed blockwise",
    "train-step --shape tiny --prompts 2 --samples 4 --prompt-tokens 8 --response-tokens 64 --max-tokens 128 "
    "--warmup 1 --repeat 2 --recipes blockwise --fp8-param",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results that each command writes where OpenRLHF, Ray, vLLM and DeepSpeed are not installed."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "sitecustomize.py").write_text(WITHOUT)
    (folder / "alone.py").write_text(ALONE)
    outputs = {words.split()[0]: folder / "made" / f"{words.split()[0]}.json" for words in COMMANDS}
    commands = [f"{words} --output {outputs[words.split()[0]]}" for words in COMMANDS]
    path = os.pathsep.join([str(folder), *(p for p in sys.path if p)])
    environment = os.environ | {"PYTHONPATH": path}
    program = [sys.executable, str(folder / "alone.py"), *commands]
    ended = subprocess.run(program, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "colocated, 1 MiB, checksum" in ended.stdout
    return {name: json.loads(output.read_text()) for name, output in outputs.items()}


@pytest.mark.slow
def test_the_weight_sync_and_the_lm_head(alone: dict[str, Any]) -> None:
    assert alone["weight-sync"]["machine"]["versions"]["torch"]
    (case,) = alone["lm-head"]["cases"]
    assert case["absent"]["openrlhf"] == "not installed" and "openrlhf_gtpo" in case["measured"]


@pytest.mark.slow
def test_layers(alone: dict[str, Any]) -> None:
    written = alone["layers"]
    (case,) = written["cases"]
    assert written["machine"]["versions"]["megatron-core"] and written["settings"]["repeat"] == "2"
    assert case["layers"] == "portable" and case["tokens"] == 256 and case["config"]["num_hidden_layers"] == 2
    assert case["flops"]["forward"] == 2 * decoder_flops(ModelShape.of(read_shape("tiny")), [64, 64])
    assert case["flops"]["train_step"] == case["flops"]["forward_backward"] == 3 * case["flops"]["forward"]
    assert {name: one["fp8"] for name, one in case["measured"].items()} == {
        BF16: None,
        "delayed": "emulated delayed",
        "blockwise": "emulated blockwise",
    }
    rate = statistics.median(case["matrix"]["flops_per_second"])
    for name, one in case["measured"].items():
        assert one["failure"] is None and one["peak_bytes"] > 0
        for phase, seconds in one["seconds"].items():
            found, base = case["derived"][name][phase], case["measured"][BF16]["seconds"][phase]
            assert len(seconds) == 2
            assert found["tokens_per_second"] == pytest.approx([256 / each for each in seconds])
            assert found["times_bf16"] == pytest.approx([a / b for a, b in zip(base, seconds)])
            assert found["mfu"] == pytest.approx(
                statistics.median(case["flops"][phase] / each for each in seconds) / rate
            )


@pytest.mark.slow
def test_a_train_step(alone: dict[str, Any]) -> None:
    written = alone["train-step"]
    assert written["absent"] == {"deepspeed": "not installed: openrlhf, deepspeed, ray"}
    assert set(written["measured"]) == {BF16, "blockwise", "blockwise, FP8 weights"}
    primary = written["measured"]["blockwise, FP8 weights"]["grad_norms"]
    assert primary == pytest.approx(written["measured"]["blockwise"]["grad_norms"], rel=1e-4)
    bf16, blockwise = (written["measured"][name] for name in (BF16, "blockwise"))
    assert bf16["tokens"] == blockwise["tokens"] and len(set(bf16["tokens"])) == 2
    for norm, other in zip(bf16["grad_norms"], blockwise["grad_norms"], strict=True):
        assert math.isfinite(norm) and norm > 0
        assert norm != other and norm == pytest.approx(other, rel=0.2)
    for phase in ("old_policy", "advantages", "train"):
        speeds = [tokens / s for tokens, s in zip(bf16["tokens"], bf16["seconds"][phase])]
        assert written["derived"][BF16][phase]["tokens_per_second"] == pytest.approx(speeds)
    whole = written["derived"]["blockwise"]["step"]
    seconds = [sum(parts) for parts in zip(*blockwise["seconds"].values())]
    assert whole["tokens_per_second"] == pytest.approx([t / s for t, s in zip(blockwise["tokens"], seconds)])
    faster = [sum(parts) / s for parts, s in zip(zip(*bf16["seconds"].values()), seconds)]
    assert whole["times_bf16"] == pytest.approx(faster)


def test_what_was_measured_outlasts_a_later_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    phases = {"old_policy": [1.0], "advantages": [1.0], "train": [2.0]}
    sides = [Measured(phases, {"tokens": [40]}), ProcessFailed(0, "killed")]
    monkeypatch.setattr(train_step, "run_processes", Mock(side_effect=sides))
    output = tmp_path / "made" / "train_step.json"
    assert benchmark.main(["train-step", "--shape", "tiny", "--recipes", "delayed", "--output", str(output)]) == 1
    written = json.loads(output.read_text())
    assert written["derived"][BF16]["step"]["tokens_per_second"] == [10]
    assert written["absent"] == {"delayed": "not finished", "deepspeed": "not finished"}


@pytest.mark.parametrize(
    ("recompute", "flags"),
    [("none", []), ("full", ["--actor.gradient_checkpointing_enable"]), ("selective", None)],
)
def test_deepspeed_recomputes_what_megatron_does_or_is_absent(
    recompute: str, flags: list[str] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    phases = {"old_policy": [1.0], "advantages": [1.0], "train": [2.0]}
    monkeypatch.setattr(train_step, "run_processes", Mock(return_value=Measured(phases, {"tokens": [40]})))
    seconds = {"forward": [1.0], "train": [2.0]}
    actors = Mock(return_value={"deepspeed": Measured(seconds, {"tokens": [40], "peak_bytes": None})})
    monkeypatch.setattr("benchmarks.suite.actor.measure_actors", actors)
    output = tmp_path / "train_step.json"
    words = f"train-step --shape tiny --recipes delayed --recompute {recompute} --output {output}"
    assert benchmark.main(words.split()) == 0
    absent = json.loads(output.read_text())["absent"]
    if flags is None:
        assert absent["deepspeed"] == "it recomputes whole layers or nothing, so not --recompute selective"
    else:
        assert actors.call_args.args[2] == ["--train.dynamic_batch_enable", *flags] and not absent


def test_a_step_without_advantages_is_compared_with_one_without() -> None:
    """On DeepSpeed they are computed elsewhere; in the second step it was as fast as bfloat16, in the first half."""
    bf16 = {"old_policy": [1.0, 2.0], "advantages": [7.0, 9.0], "train": [3.0, 2.0]}
    deepspeed = {"old_policy": [2.0, 2.0], "train": [6.0, 2.0]}
    found = derived({name: {"seconds": s, "tokens": [12, 8]} for name, s in ((BF16, bf16), ("deepspeed", deepspeed))})
    assert found["deepspeed"] == {
        "old_policy": {"tokens_per_second": [6, 4], "times_bf16": [0.5, 1]},
        "train": {"tokens_per_second": [2, 4], "times_bf16": [0.5, 1]},
        "step": {"tokens_per_second": [1.5, 2], "times_bf16": [0.5, 1]},
    }
    assert found[BF16]["step"] == {"tokens_per_second": [12 / 11, 8 / 13], "times_bf16": [1, 1]}


def test_operations_by_hand() -> None:
    """Two layers: H 256, MLP 512, four heads and two groups of 64 (Q 256, K and V 128), on rows of 3 and 5 tokens."""
    a_token = 256 * (256 + 128 + 128) + 256 * 256 + 256 * 512 * 3
    scores = (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)  # pairs of a token and one that it sees
    attention = scores * 64 * 4 * 2  # queries with keys, and weights with values
    assert decoder_flops(ModelShape.of(read_shape("tiny")), [3, 5]) == 2 * 2 * (8 * a_token + attention)


def test_shapes_are_those_that_were_published() -> None:
    """Parameters of a decoder layer, in millions, from the sizes of Qwen2.5's checkpoints."""
    for name, millions in (("3b", 77.1), ("7b", 233.0), ("32b", 487.6)):
        without_attention = decoder_flops(ModelShape.of(read_shape(name, 1)), [1]) - 4 * read_shape(name).hidden_size
        assert without_attention / 2e6 == pytest.approx(millions, abs=0.1)
    assert read_shape("32b").num_hidden_layers == 64 and read_shape("32b", 3).num_hidden_layers == 3


def test_a_configuration_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["7b"] | {"hidden_size": 7 * 128}))
    for name in (tmp_path, tmp_path / "config.json"):
        assert read_shape(str(name)).hidden_size == 896


def test_fp8_is_the_mode_of_the_host() -> None:
    assert fp8_options("blockwise", cuda=False).mode == "emulated"
    assert fp8_options("tensorwise", cuda=True).mode == "hybrid"
    assert fp8_options("blockwise", cuda=True).mode == "e4m3"
    for recipe in ("blockwise", "tensorwise"):
        formats = {fp8_options(recipe, cuda=cuda).gradients_in_e5m2 for cuda in (True, False)}
        assert len(formats) == 1, "the emulation has the formats of what is measured"


@pytest.mark.parametrize("name", PRESETS)
def test_every_recipe_takes_every_preset(name: str) -> None:
    found, absent = precisions(["delayed", "tensorwise", "blockwise"], read_shape(name), cuda=True)
    assert list(found) == [BF16, "delayed", "tensorwise", "blockwise"] and not absent
    found, absent = precisions(["delayed", "blockwise"], read_shape(name), cuda=True, primary_weights=True)
    assert list(found) == [BF16, "delayed", "blockwise", "blockwise, FP8 weights"]
    assert found["blockwise, FP8 weights"].primary_weights and "use tensorwise" in absent["delayed, FP8 weights"]


def test_a_width_that_a_recipe_cannot_multiply_is_named() -> None:
    shape = read_shape("tiny")
    shape.intermediate_size = 528
    found, absent = precisions(["tensorwise", "blockwise"], shape, cuda=True)
    assert list(found) == [BF16, "tensorwise"] and "multiples of 128" in absent["blockwise"]


def test_the_shortest_responses_have_a_token() -> None:
    for longest, expected in ((1, {1}), (3, {1, 2, 3}), (32, set(range(16, 33)))):
        assert set(even_lengths(1000, longest, seed=0).tolist()) == expected


def test_micro_batches_hold_every_row_once() -> None:
    lengths = [5, 90, 40, 60, 10, 300, 40]
    parts = first_fit(lengths, 100)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in part) <= 100 or part == [5] for part in parts) and len(parts) == 4
    sizes = {"prompts": 3, "samples": 4, "prompt_tokens": 8, "response_tokens": 60, "max_tokens": 100}
    batch = Step(None, argparse.Namespace(**sizes, seed=1), vocabulary=50)
    batch.new_batch(repetition=1)
    assert batch.tokens == [sum(len(tokens) for part in batch.micro_batches for tokens, _ in part)]
    assert sorted(batch.group_ids.tolist()) == [0] * 4 + [1] * 4 + [2] * 4
    for group in range(3):
        assert batch.outcome[batch.group_ids == group].sum() == 2


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("layers --tokens 100 --sequence-length 64", "--tokens 100 is not a multiple of --sequence-length 64."),
        ("layers --repeat 0", "Expected --repeat >= 1, got 0."),
        (
            "layers --shape 8b",
            "'8b' is neither tiny, 3b, 7b, 32b nor a Hugging Face config.json or a folder with one "
            "(No such file or directory).",
        ),
        ("layers --layers 0", "Expected --layers >= 1, got 0."),
        ("train-step --samples 1", "Expected --samples >= 2, got 1."),
        ("train-step --max-tokens 0", "Expected --max-tokens >= 1, got 0."),
    ],
)
def test_a_mistake_is_one_sentence(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(words.split()) == 2
    message = capsys.readouterr().err
    assert message == f"benchmark {words.split()[0]}: {sentence}\n"
