"""The conversion command keeps every weight and the tokenizer, and answers a user's mistake in one sentence."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_gtpo import platform
from openrlhf_gtpo.cli import convert as cli
from tests.megatron.test_megatron_export import tensors
from tests.support.export_program import alone
from tests.support.families import make_checkpoint
from tests.support.moe_program import make_mixture
from tests.support.rank_pool import RankPool


@dataclass
class Ended:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def convert(
    ranks: RankPool, one_rank: RankPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Ended]:
    """Runs the command in this process, and its ranks in the pools' processes."""
    pools = {4: ranks, 1: one_rank}

    def run(function: Callable, count: int, *args: Any) -> None:
        pools[count].run(alone, function, *args)

    def ended(*args: Any) -> Ended:
        code = cli.main([str(arg) for arg in args])
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    monkeypatch.setattr(cli, "run_processes", run)
    monkeypatch.setenv(platform.PLATFORM_VARIABLE, "cpu")
    return ended


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("convert") / "model", "qwen2", 896, tie_word_embeddings=True)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not the model's")
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways(convert: Callable[..., Ended], source: Path, tmp_path: Path, dtype: str) -> None:
    sizes = ["--tensor-parallel", 2, "--pipeline-model-parallel-size", 2]  # the second in its earlier spelling
    chosen = ["--dtype", dtype] if dtype != "float32" else []
    ended = convert("hf-to-megatron", source, tmp_path / "megatron", *sizes, *chosen)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(tmp_path / "megatron")
    described = json.loads((tmp_path / "megatron" / "checkpoint.json").read_text())
    assert (described["dtype"], described["world_size"], described["optimizer"]) == (dtype, 4, False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]

    ended = convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    assert ended.returncode == 0, ended.stderr
    expected = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors(source).items()}
    found = tensors(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    names = {path.name for path in source.iterdir()} - {"notes.txt"}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == names
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == dtype


def test_a_mixture_of_experts_on_several_ranks(convert: Callable[..., Ended], tmp_path: Path) -> None:
    mixture = make_mixture(tmp_path / "mixture", "normalised")
    ended = convert("hf-to-megatron", mixture, tmp_path / "megatron", "--tensor-parallel", 2, "--pipeline-parallel", 2)
    assert ended.returncode == 0, ended.stderr
    ended = convert("megatron-to-hf", tmp_path / "megatron", tmp_path / "hf")
    assert ended.returncode == 0, ended.stderr
    expected, found = tensors(mixture), tensors(tmp_path / "hf")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_mistakes_are_one_sentence(convert: Callable[..., Ended], source: Path, tmp_path: Path) -> None:
    full, foreign, truncated = tmp_path / "full", tmp_path / "foreign", tmp_path / "truncated"
    for folder in (full, foreign, truncated):
        folder.mkdir()
    cut = tmp_path / "cut"
    shutil.copytree(source, cut)
    weights = next(cut.glob("*.safetensors"))
    os.truncate(weights, weights.stat().st_size - 100)
    unsaid = tmp_path / "unsaid"
    shutil.copytree(source, unsaid)
    config = json.loads((unsaid / "config.json").read_text())
    (unsaid / "config.json").write_text(json.dumps({name: config[name] for name in config if name != "dtype"}))
    (full / "something").touch()
    (foreign / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({}, foreign / "model.safetensors")
    manifest = {"format": 2, "model": {}, "dtype": "float32", "optimizer": False, "files": {"common.pt": {"size": 9}}}
    (truncated / "checkpoint.json").write_text(json.dumps(manifest))
    new = tmp_path / "new"
    mistakes = [
        (("hf-to-megatron", tmp_path / "nowhere", new), f"SRC {tmp_path / 'nowhere'} is not a folder"),
        (("hf-to-megatron", cut, new), f"SRC {cut}: {weights.name} cannot be read: "),
        (("hf-to-megatron", source, full), "is not empty; name a new folder."),
        (("hf-to-megatron", source, full / "something"), "is a file; name a new folder."),
        (
            ("hf-to-megatron", source, full / "something" / "new"),
            f"cannot be written, because of {full / 'something'};",
        ),
        (
            ("hf-to-megatron", unsaid, new),
            f"{unsaid} has no dtype in its config.json; choose --dtype bfloat16 or float32.",
        ),
        (("hf-to-megatron", foreign, new), "does not support the architecture 'gpt2'"),
        (
            ("hf-to-megatron", source, new, "--tensor-parallel", 3),
            "--tensor-parallel 3 does not divide this model's 8 attention heads; it can be 1, 2 or 4.",
        ),
        (
            ("hf-to-megatron", source, new, "--pipeline-parallel", 3),
            "--pipeline-parallel 3 does not divide this model's 4 layers; it can be 1, 2 or 4.",
        ),
        (
            ("hf-to-megatron", source, new, "--tensor-parallel", 0),
            "Expected --tensor-parallel >= 1, got 0.",
        ),
        (("megatron-to-hf", tmp_path / "nowhere", new), f"There is no checkpoint {tmp_path / 'nowhere'}."),
        (("megatron-to-hf", source, new), "is not a checkpoint of the Megatron actor: it has no checkpoint.json."),
        (("megatron-to-hf", truncated, new), "is not whole: its file common.pt is missing"),
    ]
    for args, sentence in mistakes:
        ended = convert(*args)
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith(f"convert {args[0]}: ") and ended.stderr.count("\n") == 1, ended.stderr
        assert sentence in ended.stderr
        assert not new.exists()
