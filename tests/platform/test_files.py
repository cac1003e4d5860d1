"""A model on the Hub is fetched once, whole and without anything else; without a network the cache suffices, or one
sentence says what is missing."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import files
from openrlhf_gtpo.platform.files import INDEX, model_folder, replace_text, weight_shapes

COMMIT = "0" * 40
SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
FILES = dict.fromkeys(["config.json", "tokenizer.json", *SHARDS.values()], "{}")
FILES |= {INDEX: json.dumps({"weight_map": SHARDS})}


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lay out the cache folder of ``someone/something`` with these of its files; nothing can be fetched."""
    files._snapshot.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def lay_out(*names: str) -> Path:
        model = tmp_path / "models--someone--something"
        snapshot = model / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (model / "refs").mkdir()
        (model / "refs" / "main").write_text(COMMIT)
        for name in names:
            (snapshot / name).write_text(FILES.get(name, ""))
        return snapshot

    return lay_out


def test_what_is_cached_does_without_a_network(cached: Callable[..., Path], tmp_path: Path) -> None:
    folder = cached(*FILES)
    assert model_folder("someone/something") == folder
    assert model_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("names", "missing"),
    [(("config.json",), "*.safetensors"), (("config.json", INDEX, SHARDS["a"]), SHARDS["b"])],
    ids=["configuration-alone", "a-shard-short"],
)
def test_a_part_of_a_model_is_no_model(cached: Callable[..., Path], names: tuple[str, ...], missing: str) -> None:
    folder = cached(*names)
    assert model_folder("someone/something", weights=False) == folder
    with pytest.raises(UsageError, match=f"the weights in {folder} lack ") as refusal:
        model_folder("someone/something")
    assert f"lack {missing}; fetch them on a host with a network (hf download someone/something)" in str(refusal.value)
    (folder / INDEX).write_text('{"weight_map": ')
    with pytest.raises(UsageError, match=f"{folder}: {INDEX} cannot be read: Expecting value"):
        model_folder("someone/something")


def test_a_second_copy_of_the_weights_does_not_count(tmp_path: Path) -> None:
    """As in the folder of a Mistral model, under other names."""
    for file, name in (("model.safetensors", "model.norm.weight"), ("consolidated.safetensors", "norm.weight")):
        save_file({name: torch.zeros(2, 3)}, tmp_path / file)
    assert weight_shapes(tmp_path) == {"model.norm.weight": (2, 3)}


def test_a_weight_in_two_files_is_not_chosen_by_chance(tmp_path: Path) -> None:
    """Transformers would read model.safetensors, vLLM what an index names."""
    for file in ("model.safetensors", "ema.safetensors"):
        save_file({"model.norm.weight": torch.zeros(2)}, tmp_path / file)
    with pytest.raises(UsageError, match="ema.safetensors and model.safetensors both have the weight model.norm.we"):
        weight_shapes(tmp_path)


def test_a_text_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    replace_text(tmp_path / "flags.json", "whole")
    with pytest.raises(UnicodeEncodeError):
        replace_text(tmp_path / "flags.json", "half \ud800")
    assert [path.name for path in tmp_path.iterdir()] == ["flags.json"]
    assert (tmp_path / "flags.json").read_text() == "whole"
