"""Parameter counts match the checkpoint and each rank, and operation counts match those done by hand."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_gtpo.model_shape import PRESETS, ModelShape, decoder_flops, forward_flops, head_flops, read_config

COMMON = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
COMMON |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 64}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "phi3": {"pad_token_id": None},
    "smollm3": {"pad_token_id": None},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_transformers(family: str, tied: bool) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **(COMMON | FAMILIES[family] | {"tie_word_embeddings": tied}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert ModelShape.of(config).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name, billions", [("7b", 7.616), ("32b", 32.764)])
def test_published_sizes(name: str, billions: float) -> None:
    assert ModelShape.of(SimpleNamespace(**PRESETS[name])).parameters / 1e9 == pytest.approx(billions, abs=1e-3)


def shape(family: str = "qwen2", **fields: object) -> ModelShape:
    return ModelShape.of(SimpleNamespace(model_type=family, **(COMMON | FAMILIES[family] | fields)))


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_together_hold_the_model(family: str) -> None:
    """Everything except norms and routers is split; the vocabulary is padded to 1024 at TP 2 and 4."""
    whole, layers = shape(family), 3
    for tensor in (2, 4):
        stages = [whole.stage_parameters(i, tensor=tensor, pipeline=3) for i in range(3)]
        assert stages[0]["head"] == stages[1]["head"] == stages[1]["embedding"] == stages[2]["embedding"] == 0
        total = sum(sum(part * tensor for part in stage.values()) for stage in stages)
        repeated = sum(whole.layer_parameters().get(name, 0) for name in ("norms", "router")) * layers + 64
        assert total == whole.parameters + 2 * 24 * 64 + (tensor - 1) * repeated


def test_a_tied_head_is_a_copy_on_another_stage() -> None:
    tied = shape("llama", tie_word_embeddings=True)
    assert tied.stage_parameters(0)["head"] == 0
    last = tied.stage_parameters(2, pipeline=3)
    assert last["head"] == 1024 * 64 and last["embedding"] == 0


def test_experts_are_shared_out() -> None:
    moe = shape("qwen3_moe")
    assert moe.layer_parameters()["experts"] == 4 * 3 * 64 * 48
    assert moe.layer_parameters(tensor=2, expert=2)["experts"] == 4 * 3 * 64 * 48 // 4


def test_operations_by_hand() -> None:
    """Three layers, eight heads and four groups of 8: Q 64, K and V 32. Rows of 2 and 3 tokens see 3 and 6 places."""
    a_token = 64 * (64 + 32 + 32) + 64 * 64 + 3 * 64 * 96
    assert decoder_flops(shape(), [2, 3]) == 3 * (2 * 5 * a_token + 2 * 2 * (3 + 6) * 64)
    assert head_flops(shape(), 4) == 2 * 4 * 64 * 1000
    assert forward_flops(shape(), [2, 3], 4) == decoder_flops(shape(), [2, 3]) + head_flops(shape(), 4)


def test_experts_that_a_token_is_not_given_to_do_nothing() -> None:
    moe = shape("qwen3_moe")
    a_token = 64 * (128 + 64 + 64) + 128 * 64 + 2 * 3 * 64 * 48 + 64 * 4
    assert decoder_flops(moe, [1]) == 3 * (2 * a_token + 2 * 2 * 128)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_that_leaves_fields_to_their_defaults(family: str, tmp_path: Path) -> None:
    """The defaults are those of transformers' configuration class."""
    from transformers import AutoConfig

    fields = COMMON | FAMILIES[family] | {"model_type": family}
    given = {name: value for name, value in fields.items() if name not in ("num_key_value_heads", "head_dim")}
    (tmp_path / "config.json").write_text(json.dumps(given))
    found = ModelShape.of(SimpleNamespace(**read_config(tmp_path)))
    assert found == ModelShape.of(AutoConfig.from_pretrained(tmp_path))
