"""These tests catch an override that reaches Megatron with the wrong type or silently contradicts another flag."""

import dataclasses
import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.megatron_overrides import FLAGS, parse_overrides


def refusal(*words: str, flag: str = "override") -> str:
    with pytest.raises(UsageError) as caught:
        parse_overrides(words, flag)
    message = str(caught.value)
    assert "\n" not in message and message.endswith((".", "?")) and message.startswith(f"--megatron.{flag} ")
    return message


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("bias_dropout_fusion=false", False),
        ("bias_dropout_fusion=True", True),
        ("bias_dropout_fusion=1", True),
        ("moe_deepep_num_sms=24", 24),
        ("init_method_std=1e-2", 0.01),
        ("embedding_init_method_std=none", None),
        ("embedding_init_method_std=0.5", 0.5),
        ("moe_router_dtype=fp32", "fp32"),
        ("moe_router_dtype=None", None),
        ("transformer_impl=local", "local"),
        ("recompute_num_layers=2", 2),
        ("recompute_modules=core_attn", ["core_attn"]),
        ("recompute_modules=core_attn,mlp", ["core_attn", "mlp"]),
        ("linear_attention_freq=4", 4),
        ("linear_attention_freq=1,0", [1, 0]),
        ("cp_comm_type=p2p", "p2p"),
        ("cp_comm_type=p2p,a2a", ["p2p", "a2a"]),
        ("config_logger_dir=a=b", "a=b"),
        ("config_logger_dir=a,b", "a,b"),
        ("recompute_modules=none", None),
        ("cp_comm_type=none", None),
        ("moe_router_dtype=fp32", "fp32"),
    ],
)
def test_a_value_gets_the_fields_type(word: str, value: Any) -> None:
    name = word.partition("=")[0]
    found = parse_overrides([word])
    assert found == {name: value} and type(found[name]) is type(value)


def test_an_enumeration_is_given_by_name() -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert parse_overrides(["attention_backend=flash"]) == {"attention_backend": AttnBackend.flash}


def test_several_are_one_dictionary_and_none_is_empty() -> None:
    assert parse_overrides([]) == {}
    assert parse_overrides(["moe_router_dtype=fp32", "fp8_margin=1"]) == {"moe_router_dtype": "fp32", "fp8_margin": 1}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("bias_dropout_fusion=maybe", "should be a valid boolean"),
        ("bias_dropout_fusion=2", "should be a valid boolean"),
        ("moe_deepep_num_sms=2.5", "should be a valid integer"),
        ("init_method_std=nan", "should be a finite number."),
        ("embedding_init_method_std=", "should be a valid number, unable to parse string as a number, or none."),
        ("moe_router_dtype=fp8", "should be 'fp32' or 'fp64', or none."),
        ("attention_backend=flsh", "should be 'flash', 'fused', 'unfused', 'local' or 'auto'."),
        ("linear_attention_freq=1,x", "should be a valid integer"),
        ("timers=now", "should be callable"),
        ("fp8_margin", "should be a valid integer"),
        ("moe_router_dtpe=fp32", "has no field 'moe_router_dtpe'; did you mean moe_router_dtype?"),
        ("zzzzzz=1", "has no field 'zzzzzz'; Megatron's documentation lists its fields."),
        ("_cpu_offloading_context=none", "has no field"),
        ("tensor_model_parallel_size=2", "give --megatron.tensor_model_parallel_size."),
        ("sequence_parallel=true", "give --megatron.sequence_parallel."),
        ("recompute_granularity=full", "give --megatron.recompute."),
        ("params_dtype=bf16", "give --ds.param_dtype."),
        ("num_layers=3", "it comes from the checkpoint's config.json."),
        ("window_size=128,0", "it comes from the checkpoint's config.json."),
        ("moe_aux_loss_coeff=0.01", "the actor does not balance experts."),
        ("moe_z_loss_coeff=0.001", "the actor does not balance experts."),
        ("moe_router_load_balancing_type=sinkhorn", "the actor does not balance experts."),
        ("moe_expert_capacity_factor=1.0", "the engines route as the checkpoint's config.json says."),
        ("num_layers_in_first_pipeline_stage=3", "split evenly"),
        ("hidden_dropout=0.1", "the training step relies on its value."),
    ],
)
def test_what_cannot_be_used_is_one_sentence(word: str, message: str) -> None:
    found = refusal(word)
    assert found.startswith(f"--megatron.override {word}") and message in found


@pytest.mark.parametrize(
    ("word", "value"),
    [("overlap_param_gather=false", False), ("bucket_size=100000000", 10**8), ("bucket_size=none", None)],
)
def test_the_same_for_gradients_and_their_reduction(word: str, value: Any) -> None:
    assert parse_overrides([word], "ddp") == {word.partition("=")[0]: value}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (
            "overlap_grad_reduces=true",
            "DistributedDataParallelConfig has no field 'overlap_grad_reduces'; did you mean",
        ),
        ("moe_router_dtype=fp32", "DistributedDataParallelConfig has no field 'moe_router_dtype'"),
        ("overlap_grad_reduce=maybe", "should be a valid boolean"),
        ("use_distributed_optimizer=false", "give --megatron.use_distributed_optimizer."),
        ("grad_reduce_in_fp32=false", "the training step relies on its value."),
        ("use_megatron_fsdp=true", "which the actor does not use."),
    ],
)
def test_which_refuses_in_the_same_way(word: str, message: str) -> None:
    found = refusal(word, flag="ddp")
    assert found.startswith(f"--megatron.ddp {word}") and message in found


@pytest.mark.parametrize("flag", FLAGS)
def test_reserved_names_are_fields_of_megatron(flag: str) -> None:
    module, name, contradicting = FLAGS[flag]
    config = getattr(importlib.import_module(f"megatron.core.{module}"), name)
    refused = " ".join(contradicting.values()).split()
    assert set(refused) <= {field.name for field in dataclasses.fields(config)} and len(set(refused)) == len(refused)


@given(st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_keep_their_value(number: float) -> None:
    assert parse_overrides([f"init_method_std={number!r}"]) == {"init_method_std": number}


@given(st.text())
def test_any_text_is_a_value_or_one_refusal(text: str) -> None:
    for field in (
        "moe_router_dtype",
        "moe_deepep_num_sms",
        "recompute_modules",
        "attention_backend",
        "moe_layer_freq",
    ):
        try:
            parse_overrides([f"{field}={text}"])
        except UsageError:
            pass
