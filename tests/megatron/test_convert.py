"""The conversion command keeps every weight and the tokenizer, and answers a user's mistake in one sentence."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

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
