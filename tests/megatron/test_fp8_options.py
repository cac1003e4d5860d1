"""FP8 is refused on a device, build or width that cannot do it, and on no other; Megatron knows the fields it sets."""

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import (
    FP32_SCALES,
    MODES,
    RECIPES,
    Fp8Options,
    check_fp8,
)
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError

BLACKWELL, HOPPER, ADA, AMPERE = (10, 0), (9, 0), (8, 9), (8, 0)


def model(**changes: Any) -> SimpleNamespace:
    """Qwen2.5-32B's numbers."""
    values: dict[str, Any] = {
        "model_type": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    }
    return SimpleNamespace(**values | changes)


def refusal(options: Fp8Options, config: SimpleNamespace, layout: Layout, *, cuda: bool = True) -> str:
    with pytest.raises(LayoutError) as caught:
        check_fp8(options, config, layout, cuda=cuda)
    message = str(caught.value)
    assert message.endswith(".") and "\n" not in message
    return message


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_32b_model_fits_at_every_legal_size(recipe: str, size: int) -> None:
    layout = Layout(tensor_model_parallel_size=size, pipeline_model_parallel_size=2)
    check_fp8(Fp8Options("hybrid", recipe), model(), layout, cuda=True)


def test_megatron_knows_the_fields() -> None:
    from megatron.core.transformer import TransformerConfig

    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    for mode in MODES:
        for recipe in RECIPES:
            fields = Fp8Options(mode, recipe, 1).fields()
            assert set(fields) <= known and bool(fields) == (mode != "emulated")
    config = TransformerConfig(
        num_layers=4, hidden_size=64, num_attention_heads=2, **Fp8Options("hybrid", "blockwise", 1).fields()
    )
    assert config.fp8_recipe == "blockwise" and config.first_last_layers_bf16


def test_alignment_and_formats() -> None:
    assert [Fp8Options("hybrid", recipe).alignment for recipe in RECIPES] == [16, 16, 128]
    assert Fp8Options("emulated", "tensorwise").gradients_in_e5m2 and Fp8Options("hybrid").gradients_in_e5m2
    assert not Fp8Options("emulated", "blockwise").gradients_in_e5m2 and not Fp8Options("e4m3").gradients_in_e5m2


@pytest.mark.parametrize("value", ["0", "true"])
def test_powers_of_two_that_the_user_asks_for_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(FP32_SCALES, value)
    for mode in MODES:
        assert f"{FP32_SCALES}={value} in the environment" in refusal(Fp8Options(mode, "blockwise"), model(), Layout())
    check_fp8(Fp8Options("hybrid", "tensorwise"), model(), Layout(), cuda=True)


@pytest.mark.parametrize("rounded", ["", "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"])
def test_the_recipe_in_force_has_float32_scales(monkeypatch: pytest.MonkeyPatch, rounded: str) -> None:
    """Transformer Engine's recipe class tells, no matter who imported it and when."""
    from openrlhf_gtpo.megatron.model.policy import ModelOptions, load_model

    def load(recipe: str) -> None:
        with pytest.raises(UsageError, match="no model is loaded"):
            load_model("x", ModelOptions(fp8=Fp8Options("hybrid", recipe)))

    def no_model(*unused: Any, **options: Any) -> None:
        raise UsageError("no model is loaded")

    monkeypatch.setattr("openrlhf_gtpo.megatron.model.policy.model_folder", no_model)
    names = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")
    recipe = SimpleNamespace(**{name: SimpleNamespace(power_2_scale=name == rounded) for name in names})
    module = SimpleNamespace(Float8BlockScaling=recipe)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", module)  # type: ignore[arg-type]
    for parent in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, parent, SimpleNamespace(__path__=[]))  # type: ignore[arg-type]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: HOPPER)
    monkeypatch.setattr("torch.version.cuda", "12.9")
    load("tensorwise")
    if rounded:
        with pytest.raises(LayoutError, match="in this process Transformer Engine rounds them to powers of two"):
            load("blockwise")
    else:
        load("blockwise")


def test_the_emulation_takes_the_portable_layers_where_transformer_engine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from openrlhf_gtpo.megatron.model import policy as model_module
    from openrlhf_gtpo.megatron.model.policy import ModelOptions

    monkeypatch.setattr(model_module, "has_transformer_engine", lambda: True)
    portable = [ModelOptions(fp8=fp8).fields()["portable_layers"] for fp8 in (None, *map(Fp8Options, MODES))]
    assert portable == [False, False, False, True]
