"""An override reaches Megatron in the field's type; one that would train something else in silence is refused."""

import dataclasses
import importlib
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.megatron_overrides import FLAGS, parse_overrides


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("bias_dropout_fusion=True", True),
        ("moe_deepep_num_sms=24", 24),
        ("init_method_std=1e-2", 0.01),
        ("embedding_init_method_std=none", None),
        ("moe_router_dtype=fp32", "fp32"),
        ("recompute_modules=core_attn", ["core_attn"]),
        ("linear_attention_freq=4", 4),
        ("linear_attention_freq=1,0", [1, 0]),
        ("cp_comm_type=p2p", "p2p"),
        ("cp_comm_type=p2p,a2a", ["p2p", "a2a"]),
        ("config_logger_dir=a=b,c", "a=b,c"),
    ],
)
def test_a_value_gets_the_fields_type(word: str, value: Any) -> None:
    name = word.partition("=")[0]
    found = parse_overrides([word])
    assert found == {name: value} and type(found[name]) is type(value)


def test_several_are_one_dictionary_and_none_is_empty() -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert parse_overrides([]) == {}
    assert parse_overrides(["moe_router_dtype=fp32", "fp8_margin=1"]) == {"moe_router_dtype": "fp32", "fp8_margin": 1}
    assert parse_overrides(["attention_backend=flash"]) == {"attention_backend": AttnBackend.flash}
    assert parse_overrides(["overlap_param_gather=false", "bucket_size=none"], "ddp") == {
        "overlap_param_gather": False,
        "bucket_size": None,
    }


@pytest.mark.parametrize(
    ("flag", "word", "message"),
    [
        ("override", "bias_dropout_fusion=maybe", "boolean"),
        ("override", "moe_deepep_num_sms=2.5", "integer"),
        ("override", "init_method_std=nan", "finite"),
        ("override", "moe_router_dtype=fp8", "'fp32' or 'fp64', or none."),
        ("override", "linear_attention_freq=1,x", "integer"),
        ("override", "timers=now", "callable"),
        ("override", "fp8_margin", "integer"),
        ("override", "moe_router_dtpe=fp32", "did you mean moe_router_dtype?"),
        ("override", "zzzzzz=1", "has no field"),
        ("override", "_cpu_offloading_context=none", "has no field"),
        ("ddp", "moe_router_dtype=fp32", "has no field"),
    ],
)
def test_what_cannot_be_used_is_one_sentence(flag: str, word: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_overrides([word], flag)
    said = str(caught.value)
    assert said.startswith(f"--megatron.{flag} {word}") and message in said and "\n" not in said


@pytest.mark.parametrize("flag", FLAGS)
def test_what_would_be_silent_is_a_field_of_megatrons_and_refused(flag: str) -> None:
    module, name, silent = FLAGS[flag]
    config = getattr(importlib.import_module(f"megatron.core.{module}"), name)
    fields = {field.name for field in dataclasses.fields(config)}
    for reason, names in silent.items():
        for field in names.split():
            assert field in fields
            with pytest.raises(UsageError, match=f"{field} cannot be set here; {reason}"):
                parse_overrides([f"{field}=1"], flag)
