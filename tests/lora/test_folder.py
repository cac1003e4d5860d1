"""These tests catch a base that is taken for another because of what lies beside it, or another for it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_gtpo.lora.folder import fingerprint
from tests.support.families import SHALLOW, make_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "base", "llama", **SHALLOW)


@pytest.mark.parametrize(
    "name",
    [
        "training_args.bin",
        "optimizer.bin",
        "adapter_model.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin",
    ],
)
def test_what_lies_beside_the_tensors_is_not_the_base(name: str, base: Path) -> None:
    before = fingerprint(base)
    (base / name).touch()
    assert fingerprint(base) == before


def test_a_base_is_its_tensors_however_they_are_stored(base: Path) -> None:
    before, tensors = fingerprint(base), load_file(base / "model.safetensors")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt", "more": "words"})
    assert fingerprint(base) == before
    shards = {f"model-0000{n}-of-00002.safetensors": dict(list(tensors.items())[n::2]) for n in range(2)}
    for shard, part in shards.items():
        save_file(part, base / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    (base / "model.safetensors").unlink()
    assert fingerprint(base) == before


def test_another_value_name_or_type_is_another_base(tmp_path: Path) -> None:
    """A change of a part of 4 MiB, in the middle of a file, is seen."""
    tensors = {"a": torch.zeros(6 * 2**20), "b": torch.ones(4)}
    other = tensors["a"].clone()
    other[2**20 : 2**21 + 1] = 1
    versions = [tensors, tensors | {"a": other}, tensors | {"b": 2 * torch.ones(4)}, tensors | {"c": torch.ones(4)}]
    versions += [tensors | {"b": torch.ones(4).int()}, tensors | {"b": torch.ones(2, 2)}]
    found = []
    for version in versions:
        save_file(version, tmp_path / "model.safetensors")
        found.append(fingerprint(tmp_path))
    assert len({*found}) == len(versions)
