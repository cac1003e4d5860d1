"""A trained model's folder has its source's files byte for byte, and is written where folders cannot be renamed."""

import errno
import json
import os
from pathlib import Path

import pytest

from openrlhf_gtpo.checkpoints import hf_folder
from tests.support.families import side_files

CONFIG = (
    '{"model_type" : "llama", "torch_dtype": "bfloat16", "rope_theta": 5e5, "name": "é"}'  # no json.dumps has this
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "generation_config.json",
        "LICENSE",
        "own.py",
    ):
        (folder / name).write_text(f"{{ {name} }}")
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors").write_text("old")
    return folder


def export(source: Path, directory: Path, **changed: object) -> None:
    """Write a model as Transformers' save_pretrained does, with an adapter beside it."""
    temporary = hf_folder.begin(directory)
    for name in ("model.safetensors", "config.json", "tokenizer_config.json", "special_tokens_map.json"):
        (temporary / name).write_text("new")
    (temporary / "adapter").mkdir()
    (temporary / "adapter" / "a.safetensors").write_text("new")
    hf_folder.publish(temporary, directory, source, **changed)


def test_only_what_training_changes_is_written(source: Path, tmp_path: Path) -> None:
    export(source, tmp_path / "same", dtype="bfloat16")
    assert side_files(tmp_path / "same") == side_files(source)
    assert (tmp_path / "same" / "model.safetensors").read_text() == "new"
    export(source, tmp_path / "changed", dtype="float32", architectures=["CriticModel"])
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert config == json.loads(CONFIG) | {"torch_dtype": "float32", "architectures": ["CriticModel"]}
    assert side_files(tmp_path / "changed").keys() == side_files(source).keys()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("refused", ["nothing", "folders", "all"])
def test_a_model_is_copied_where_nothing_can_be_renamed(
    refused: str, exists: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on object stores."""

    def rename(path: Path, target: Path, real: object = os.rename) -> None:
        if refused == "all" or (refused == "folders" and os.path.isdir(path)):
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        real(path, target)  # type: ignore[operator]

    directory = tmp_path / "model"
    if exists:
        (directory / "adapter").mkdir(parents=True)
        for name in ("adapter/a.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"):
            (directory / name).write_text("old")
        (directory / "mine").write_text("kept")
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    export(source, directory, dtype="bfloat16")
    mine = {"mine": b"kept"} if exists else {}
    assert side_files(directory) == side_files(source) | mine
    assert [path.read_text() for path in sorted(directory.rglob("*.safetensors"))] == ["new", "new"]
    assert not list(tmp_path.rglob("*.tmp-*")) and not list(directory.glob("*.index.json"))
