"""``benchmark actor`` on real Ray actors: both backends train on the same ragged batches of several micro-batches."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.suite.actor import trainer_argv
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.training import run as trainer


@pytest.mark.parametrize("estimator", ["group_norm", "gtpo"])
def test_the_trainer_takes_the_flags_of_a_step(estimator: str, actor_model: str) -> None:
    """The flags are as ``benchmark overhead`` and ``benchmark actor`` give them, which start no engine."""
    step = Namespace(model=actor_model, prompts=2, samples=3, micro_batch_size=2, prompt_tokens=8, response_tokens=8)
    args = trainer.parse([*trainer_argv(step, {}), "--algo.advantage.estimator", estimator])
    assert (args.train.batch_size, args.data.max_len) == (6, 16)


@pytest.mark.usefixtures("no_engine")
def test_an_odd_number_of_rows_is_refused(actor_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["actor", "--model", actor_model, "--rows", "5"]) == 2
    sentence = "Expected an even number of --rows, two responses to each prompt, got 5."
    assert capsys.readouterr().err == f"benchmark actor: {sentence}\n"


@pytest.mark.usefixtures("no_engine")
def test_micro_batches_of_upstream_s_actor_are_full(actor_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main(["overhead", "--model", actor_model, "--prompts", "3"]) == 2
    sentence = "--micro-batch-size 16 does not divide the 24 responses of a step (--prompts 3 x --samples 8)"
    assert capsys.readouterr().err == f"benchmark overhead: {sentence}; give a divisor of 24.\n"


@pytest.mark.slow
@pytest.mark.e2e
def test_both_backends_are_measured_on_the_same_batches(actor_model: str, tmp_path: Path) -> None:
    output = tmp_path / "actor.json"
    words = "actor --rows 4 --micro-batch-size 2 --response-tokens 64 --max-tokens 128 --repeat 2".split()
    command = [sys.executable, "-m", "openrlhf_gtpo.cli.benchmark", *words, "--model", actor_model]
    command += ["--output", str(output), "--", "--train.dynamic_batch_enable"]  # packed, as ``train-step`` has it
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-4000:]
    written = json.loads(output.read_text())
    assert list(written["measured"]) == ["deepspeed", "megatron"]
    deepspeed, megatron = written["measured"].values()
    assert deepspeed["tokens"] == megatron["tokens"] and len(set(megatron["tokens"])) == 2
    for side in (deepspeed, megatron):
        assert set(side) == {"forward", "train", "tokens", "loaded_bytes", "peak_bytes"}
        assert 0 < side["loaded_bytes"] <= side["peak_bytes"]
    for phase in ("forward", "train"):
        times = sorted(a / b for a, b in zip(deepspeed[phase], megatron[phase], strict=True))
        assert written["ratios"][phase] == pytest.approx([times[0], sum(times) / 2, times[1]])
