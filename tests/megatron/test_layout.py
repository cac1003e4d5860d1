"""These tests catch a layout refused although it runs, accepted although it does not, or refused without a way out."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_gtpo.megatron.families import FAMILIES
from openrlhf_gtpo.megatron.parallel.layout import (
    Layout,
    LayoutError,
    check_layout,
    legal_layouts,
    legal_pipeline_parallel_sizes,
    legal_tensor_parallel_sizes,
)


def model(**changes: Any) -> SimpleNamespace:
    """SmolLM2-135M's numbers, as transformers 5 gives them."""
    values: dict[str, Any] = {
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }
    return SimpleNamespace(**values | changes)


def experts(**changes: Any) -> SimpleNamespace:
    numbers = {"num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48}
    numbers |= {"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return model(model_type="qwen3_moe", **numbers | changes)


def layout(tensor: int = 1, pipeline: int = 1, context: int = 1, expert: int = 1, sequence: bool = False) -> Layout:
    return Layout(tensor, pipeline, context, expert, sequence)


def refusal(config: Any, chosen: Layout, world_size: int = 1) -> str:
    with pytest.raises(LayoutError) as caught:
        check_layout(config, chosen, world_size)
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and ". " not in message, "one sentence"
    return message


# ── Sizes ──


def test_replicas_of_a_layout() -> None:
    chosen = layout(tensor=2, pipeline=3, context=2)
    assert chosen.model_parallel_size == 12
    assert chosen.data_parallel_size(48) == 4
    assert Layout().data_parallel_size(7) == 7


def test_a_model_without_grouped_heads_has_as_many_of_each() -> None:
    assert legal_tensor_parallel_sizes(model(num_key_value_heads=None)) == [1, 3]
    ungrouped = model(num_attention_heads=8)
    del ungrouped.num_key_value_heads
    assert legal_tensor_parallel_sizes(ungrouped) == [1, 2, 4, 8]


def test_context_parallel_ranks_are_of_one_replica() -> None:
    check_layout(model(), layout(context=2), 2)
    assert refusal(model(), layout(context=2), world_size=3).endswith("give a multiple of 2.")


# ── Models ──


def test_a_sliding_window_in_use() -> None:
    window = {"sliding_window": 4096, "max_position_embeddings": 32768}
    assert "over 4096 of its 32768 positions" in refusal(model(model_type="mistral", **window), Layout())
    qwen = window | {"model_type": "qwen2", "use_sliding_window": True}
    assert "sliding-window" in refusal(model(**qwen), Layout())
    assert "sliding-window" in refusal(model(**qwen, layer_types=["full_attention", "sliding_attention"]), Layout())
    unread = {"use_sliding_window": False, "layer_types": ["full_attention"] * 30}
    assert "sliding-window" in refusal(model(model_type="mistral", **window | unread), Layout())
    moe = window | {"use_sliding_window": True, "layer_types": ["full_attention"] * 30}
    assert "sliding-window" in refusal(experts(**moe), Layout())
    scaled = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    beyond = {"sliding_window": 8192, "max_position_embeddings": 8192, "rope_parameters": scaled}
    assert "sliding-window" in refusal(model(model_type="mistral", **beyond), Layout())


@pytest.mark.parametrize(
    "unused",
    [
        {"sliding_window": None},
        {"sliding_window": 8192},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": True, "layer_types": ["full_attention"] * 30},
    ],
    ids=str,
)
def test_a_sliding_window_that_hides_nothing(unused: dict[str, Any]) -> None:
    check_layout(model(model_type="qwen2", **unused), Layout(), 1)


LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "entries",
    [
        {"rope_parameters": None},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
        {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": None, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
    ],
    ids=str,
)
def test_rotary_embeddings_that_are_known(entries: dict[str, Any]) -> None:
    check_layout(model(**entries), Layout(), 1)


@pytest.mark.parametrize("kind", ["yarn", "dynamic", "longrope"])
@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
def test_a_rotary_embedding_that_is_not_known(kind: str, where: str) -> None:
    older = "type" if where == "rope_scaling" else "rope_type"
    message = refusal(model(**{"rope_parameters": None, where: {older: kind, "factor": 4.0}}), Layout())
    assert f"rotary embedding {kind!r}" in message and "default, linear, llama3" in message


def test_a_llama3_embedding_that_megatron_would_scale_otherwise() -> None:
    rope = {"rope_type": "llama3"} | LLAMA3 | {"high_freq_factor": 8.0}
    assert "only with high_freq_factor 4, and this model has 8.0" in refusal(model(rope_parameters=rope), Layout())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"mlp_bias": True}, "mlp_bias False, and this one has True"),
        ({"attention_bias": True}, "attention_bias False, and this one has True"),
        ({"hidden_act": "gelu"}, "hidden_act 'silu', and this one has 'gelu'"),
        ({"is_causal": False}, "is_causal True, and this one has False"),
    ],
    ids=str,
)
def test_a_model_that_would_lose_something(changes: dict[str, Any], message: str) -> None:
    assert message in refusal(model(**changes), Layout())


def test_a_router_without_a_choice_of_weights() -> None:
    assert "num_experts_per_tok 1" in refusal(experts(num_experts_per_tok=1), Layout())
    check_layout(experts(num_experts_per_tok=1, norm_topk_prob=False), Layout(), 1)


def test_dense_layers_among_experts() -> None:
    assert "mlp_only_layers" in refusal(experts(mlp_only_layers=[0]), Layout())
    assert "decoder_sparse_step" in refusal(experts(decoder_sparse_step=2), Layout())


# ── Layouts and sizes listed as legal ──

configs = st.builds(
    lambda groups, share, layers, width: model(
        num_attention_heads=groups * share,
        num_key_value_heads=groups,
        num_hidden_layers=layers,
        intermediate_size=width,
    ),
    *(st.integers(1, 16), st.integers(1, 4), st.integers(1, 24), st.integers(1, 256)),
)


@given(configs, st.integers(1, 48))
def test_legal_layouts_pass_and_no_other_does(config: SimpleNamespace, world_size: int) -> None:
    legal = legal_layouts(config, world_size)
    assert (1, 1) in legal
    for tensor in range(1, config.num_attention_heads + 2):
        for pipeline in range(1, config.num_hidden_layers + 2):
            try:
                check_layout(config, layout(tensor, pipeline), world_size)
                passed = True
            except LayoutError:
                passed = False
            assert passed == ((tensor, pipeline) in legal)


@given(configs)
def test_legal_sizes_divide_what_is_split(config: SimpleNamespace) -> None:
    assert legal_pipeline_parallel_sizes(config) == [
        size for size in range(1, 25) if config.num_hidden_layers % size == 0
    ]
    everything = math.gcd(config.num_attention_heads, config.num_key_value_heads, config.intermediate_size)
    assert math.lcm(*legal_tensor_parallel_sizes(config)) == everything


@pytest.mark.parametrize("kind", FAMILIES)
def test_configurations_of_transformers_are_read(kind: str) -> None:
    from transformers import AutoConfig

    changes = {"num_key_value_heads": 8, "num_attention_heads": 32, "num_hidden_layers": 4, "sliding_window": None}
    config = AutoConfig.for_model(kind, **changes)
    check_layout(config, layout(tensor=2, pipeline=2, sequence=True), 8)
    assert "it can be 1, 2, 4 or 8." in refusal(config, layout(tensor=3, sequence=True), world_size=3)


def test_a_rotary_embedding_of_transformers_is_read() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert "rotary embedding 'yarn'" in refusal(config, Layout())
