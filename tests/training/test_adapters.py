"""These tests catch adapters that are trained and reach neither engines nor exports, and modules that get some though
nobody asked for it."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.training.actors import adapters
from tests.support.families import SHALLOW, make_checkpoint

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Family, fields of its configuration, and what gets adapters beside attention.
MIXTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts alone": ("qwen3_moe", EXPERTS, ""),
    "a dense layer": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1]}, "gate_proj up_proj down_proj"),
    "a shared expert": (
        "qwen2_moe",
        EXPERTS | {"shared_expert_intermediate_size": 48},
        "gate_proj up_proj down_proj shared_expert_gate",
    ),
}
ATTENTION = "q_proj k_proj v_proj o_proj"


@pytest.fixture
def mixture(tmp_path: Path) -> Callable[[str], Any]:
    def load(name: str) -> Any:
        family, fields, _ = MIXTURES[name]
        folder = make_checkpoint(tmp_path / "base", family, **(SHALLOW | fields))
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    return load


def config(targets: str | list[str] = "all-linear", **fields: Any) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules=targets, bias="none", task_type="CAUSAL_LM", **fields)


@pytest.mark.parametrize("name", MIXTURES)
def test_all_that_is_trained_of_a_mixture_is_in_its_export(
    name: str, mixture: Callable[[str], Any], tmp_path: Path
) -> None:
    base = mixture(name)
    names = [name for name, _ in base.named_parameters()]
    policy = adapters.adapt(base, config())
    adapters.start(policy, "bf16", seed=1)
    parts = adapters.parts(policy.float())
    assert [part.name for part in parts] == names
    assert {part.name.split(".")[-2] for part in parts if part.adapter} == {
        *f"{ATTENTION} {MIXTURES[name][2]}".split()
    }
    assert not any({"experts", "gate"} & {*part.name.split(".")} for part in parts if part.adapter)

    rows = torch.arange(80).reshape(2, 40)
    before = policy(rows).logits.detach()
    optimizer = torch.optim.Adam(parameter for parameter in policy.parameters() if parameter.requires_grad)
    for _ in range(3):
        policy(rows, labels=rows).loss.backward()
        assert all(parameter.grad is not None for parameter in policy.parameters() if parameter.requires_grad)
        optimizer.step()
    source, folder = str(tmp_path / "base"), tmp_path / "exported"
    adapters.save(policy, lambda parts: nullcontext(), folder, LoraOptions(4, 8), source, is_first=True)
    exported, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values())
    trained = policy(rows).logits
    assert (trained - before).abs().max() > 0.1
    torch.testing.assert_close(exported(rows).logits, trained, rtol=1e-4, atol=1e-4)


def test_transposed_weights_are_refused() -> None:
    """PEFT adapts a Conv1D, whose weight is (in, out); a square one would be merged as if it were (out, in)."""
    shape = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **shape))
    with pytest.raises(UsageError, match="all-linear: no such linear layer can be adapted; none of this model can"):
        adapters.adapt(model, config())


def test_frozen_layers_stay_frozen(mixture: Callable[[str], Any]) -> None:
    """As those of an image encoder with --actor.freeze_visual_encoder."""
    model = mixture("experts alone")
    model.model.layers[0].requires_grad_(False)
    adapted = [part.name for part in adapters.parts(adapters.adapt(model, config())) if part.adapter]
    assert len(adapted) == 4 and all(name.startswith("model.layers.1.") for name in adapted)


@pytest.mark.parametrize(
    ("fields", "lost"),
    [
        ({}, "mlp.experts"),
        ({"targets": ["q_proj"], "modules_to_save": ["lm_head"]}, "lm_head.modules_to_save"),
        ({"targets": ["q_proj"], "use_dora": True}, "lora_magnitude_vector"),
        ({"targets": ["q_proj"], "lora_bias": True}, "lora_B.default.bias"),
    ],
    ids=str,
)
def test_nothing_is_trained_for_nobody(fields: dict[str, Any], lost: str, mixture: Callable[[str], Any]) -> None:
    """However PEFT has made the model."""
    policy = get_peft_model(mixture("experts alone"), config(**fields))
    with pytest.raises(AssertionError, match=lost):
        adapters.start(policy, "bf16", seed=1)
