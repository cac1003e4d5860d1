"""These tests catch a base that is taken for another because of what lies beside it, or another for it, and a folder
of adapters that PEFT reads as another policy."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.lora.folder import fingerprint, refusal, without_comparison, write_adapter
from tests.support.families import SHALLOW, make_checkpoint

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


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


def test_an_older_checkpoint_names_its_base_in_another_way(base: Path) -> None:
    """Its rank, scale and targets are compared all the same."""
    own = {"rank": 8, "alpha": 16, "targets": ["q_proj"], "base": fingerprint(base)}
    older, other = own | {"base": "0123456789abcdef"}, own | {"base": own["base"][:-1] + "-"}
    assert refusal(older, own) is None and "older fingerprint" in (without_comparison(older) or "")
    assert "other weights" in (refusal(other, own) or "") and without_comparison(other) is None
    assert "rank" in (refusal(older | {"rank": 4}, own) or "")


def test_the_folder_names_its_base_wherever_it_is_read(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its fields are those that every PEFT knows."""
    monkeypatch.chdir(tmp_path)
    pair = torch.zeros(4, 64), torch.zeros(64, 4)
    for name, expected in ((base.name, str(base)), ("owner/model", "owner/model")):
        write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": pair}, LoraOptions(4, 8), name)
        config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == expected
    assert {*config} == {
        *"peft_type task_type base_model_name_or_path inference_mode r lora_alpha lora_dropout bias".split(),
        "target_modules",
    }


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("qwen3_moe", MIXTURE),
        ("qwen3_moe", MIXTURE | {"mlp_only_layers": [0]}),
        ("qwen2_moe", MIXTURE | {"shared_expert_intermediate_size": 48}),
    ],
    ids=["dense", "mixture", "mixture with a dense layer", "mixture with shared experts"],
)
def test_peft_reads_the_policy_that_was_written(family: str, fields: dict[str, object], tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = make_checkpoint(tmp_path / "base", family, **(SHALLOW | fields))
    options, tokens = LoraOptions(4, 8), torch.arange(40)[None]
    merged, base = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    untrained, adapters = base(tokens).logits.detach(), {}
    for name, module in merged.named_modules():
        if type(module) is torch.nn.Linear and module is not merged.lm_head and options.adapts(name):
            a, b = (0.1 * torch.randn(shape) for shape in ((4, module.in_features), (module.out_features, 4)))
            module.weight.data += options.scale * b @ a
            adapters[name] = a, b
    write_adapter(tmp_path / "adapter", adapters, options, str(folder), is_mixture=family != "llama")
    expected, found = merged(tokens).logits, PeftModel.from_pretrained(base, str(tmp_path / "adapter"))(tokens).logits
    assert (expected - untrained).abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
