"""HF -> Megatron -> HF keeps every weight bit for bit under its name; an export loads in transformers, keeps to the
shard size, and damages nothing in its folder.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from openrlhf_gtpo.megatron.parallel.layout import Layout
from tests.megatron.test_megatron_logits import LAYOUTS, MODELS
from tests.support import export_program as program
from tests.support.families import make_checkpoint
from tests.support.rank_pool import RankPool

IN_BFLOAT16 = ("llama", "qwen2-tied", "qwen3-tied")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of a Hugging Face folder; fails if a name occurs twice."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    return {
        name: make_checkpoint(folder / name, family, vocab_size, **fields)
        for name, (family, vocab_size, fields) in MODELS.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("at", ["TP4", "TP2xPP2"])
def test_there_and_back_is_bitwise(sources: dict[str, Path], at: str, tmp_path: Path, ranks: RankPool) -> None:
    layout = LAYOUTS[at]
    jobs = [(name, "float32") for name in MODELS] + [(name, "bfloat16") for name in IN_BFLOAT16]
    if at == "TP4":  # biases, per-head norms with a tied LM head, and the other dtype
        jobs = [("qwen2", "float32"), ("qwen3-tied", "float32"), ("llama", "bfloat16")]
    folders = {job: tmp_path / "-".join(job) for job in jobs}
    ranks.run(
        program.round_trips, layout, [(str(sources[name]), dtype, str(folders[name, dtype])) for name, dtype in jobs]
    )
    for (name, dtype), folder in folders.items():
        expected = {key: value.to(getattr(torch, dtype)) for key, value in tensors(sources[name]).items()}
        found = tensors(folder / "hf")
        assert found.keys() == expected.keys(), name
        assert all(found[key].dtype == expected[key].dtype for key in expected)
        assert all(torch.equal(found[key], expected[key]) for key in expected), name
        index = json.loads((folder / "hf" / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == expected.keys()
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
        config = json.loads((folder / "hf" / "config.json").read_text())
        assert config == json.loads((sources[name] / "config.json").read_text()) | {"dtype": dtype}


def test_transformers_reads_an_export(sources: dict[str, Path], tmp_path: Path, one_rank: RankPool) -> None:
    from transformers import AutoModelForCausalLM

    one_rank.run(program.round_trips, Layout(), [(str(sources["qwen2-tied"]), "float32", str(tmp_path))])
    tokens = torch.arange(12).unsqueeze(0)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in (sources["qwen2-tied"], tmp_path / "hf")]
    with torch.no_grad():
        one, two = (model(tokens).logits for model in models)
    assert torch.equal(one, two)


def test_shards_keep_to_their_size(sources: dict[str, Path], tmp_path: Path, one_rank: RankPool) -> None:
    one_rank.run(program.export_into, str(sources["llama"]), str(tmp_path / "new"), program.SHARD_BYTES)
    shards = sorted((tmp_path / "new").glob("*.safetensors"))
    assert len(shards) > 2
    assert [path.name for path in shards] == [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]
    header = 16 * 2**10
    assert all(path.stat().st_size < program.SHARD_BYTES + header for path in shards)


def test_an_export_into_a_folder_replaces_the_model_alone(
    sources: dict[str, Path], tmp_path: Path, one_rank: RankPool
) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "mine").write_text("kept")
    (tmp_path / f"{tmp_path.name}.tmp-1a2b3c4d").mkdir()  # of an export that was killed
    one_rank.run(program.export_into, str(sources["llama"]), str(tmp_path), program.SHARD_BYTES)
    one_rank.run(program.export_into, str(sources["llama"]), str(tmp_path), 10**9)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoints", "config.json", "generation_config.json", "model.safetensors"]
    assert (tmp_path / "checkpoints" / "mine").read_text() == "kept"
    assert tensors(tmp_path).keys() == tensors(sources["llama"]).keys()


def test_a_failed_export_leaves_nothing_and_fails_everywhere(
    sources: dict[str, Path], tmp_path: Path, ranks: RankPool
) -> None:
    layout = Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    for message, there in ranks.run(program.failing_export, str(sources["llama"]), layout, str(tmp_path)):
        assert str(tmp_path / "hf") in message and "No space left on device" in message and "\n" not in message
        assert there == []
