"""These tests catch a policy model whose log-probs, entropies or gradients are not those of OpenRLHF's ``Actor``.

Both run in fp32 on the same weights, so they may differ only by rounding. Upstream compiles its entropy; here it runs
as written, which needs no compiler.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from openrlhf.models import Actor
from torch.nn.attention import varlen

from openrlhf_gtpo.platform import varlen_attention
from openrlhf_gtpo.training.actors.policy_model import PolicyModel
from tests.support.packed_rows import reference

VOCABULARY, TEMPERATURE = 97, 0.7
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # entropies well below log(vocabulary)
}


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    with torch.compiler.set_stance("force_eager"):
        yield


def causal_lm(kind: str, tied: bool = False, attention: str = "sdpa", **options: Any) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{kind}Config")
    config = config_class(**TINY, tie_word_embeddings=tied, attn_implementation=attention, **options)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    model.config.use_cache = False
    return model.eval()


def actors(
    model: torch.nn.Module, packing: bool = False, temperature: float = TEMPERATURE
) -> tuple[Actor, PolicyModel]:
    """Upstream's actor and ours around one model."""
    pair = Actor(model, temperature=temperature), PolicyModel(model, temperature=temperature)
    for actor in pair:
        actor.packing_samples = packing
    return pair


def batch(padding: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ragged rows padded on one or both sides; the action mask (T - 1 columns) starts inside and has holes."""
    generator = torch.Generator().manual_seed(seed)
    width = 14
    spans = {
        "right": [(0, 14), (0, 9), (0, 5)],
        "left": [(0, 14), (6, 14), (9, 14)],
        "both": [(2, 14), (0, 9), (4, 11)],
    }
    attention = torch.zeros(3, width, dtype=torch.long)
    actions = torch.zeros(3, width - 1, dtype=torch.long)
    for i, (start, end) in enumerate(spans[padding]):
        attention[i, start:end] = 1
        actions[i, start + 2 : end - 1] = 1  # action column t is token t + 1
        if end - start > 8:
            actions[i, start + 4 : start + 6] = 0
    sequences = torch.randint(1, VOCABULARY, (3, width), generator=generator) * attention
    return {"sequences": sequences, "action_mask": actions, "attention_mask": attention}


def run(actor: Actor, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, A) log-probs and entropies, both 0 outside the action mask."""
    log_probs, output = actor(**data, return_output=True, return_entropy=True)
    mask = data["action_mask"]
    return log_probs, output.entropy[:, -mask.shape[1] :] * mask


def gradients(actor: Actor, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The gradients of a loss that weighs every token differently and uses log-probs and entropies."""
    actor.model.zero_grad()
    log_probs, entropy = run(actor, data)
    weights = torch.linspace(-1, 1, log_probs.numel()).view_as(log_probs)
    ((log_probs + 0.1 * entropy) * weights * data["action_mask"]).sum().backward()
    found = {name: p.grad.clone() for name, p in actor.model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(actor.model.parameters()))
    return found


def assert_same_model(upstream: Actor, ours: PolicyModel, data: dict[str, torch.Tensor]) -> None:
    expected, found = run(upstream, data), run(ours, data)
    assert found[0].shape == expected[0].shape
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)
    assert (found[0] * (1 - data["action_mask"]) == 0).all()
    expected_gradients, found_gradients = gradients(upstream, data), gradients(ours, data)
    for name, value in expected_gradients.items():
        scale = value.abs().max().item()
        torch.testing.assert_close(found_gradients[name], value, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), msg=name)
    with torch.no_grad():
        torch.testing.assert_close(ours(**data), found[0], rtol=1e-5, atol=1e-6)


# ── The same as upstream's ──


@pytest.mark.parametrize(
    ("kind", "tied", "attention", "padding"),
    [
        ("Llama", False, "sdpa", "both"),
        ("Llama", True, "eager", "both"),
        ("Llama", False, "eager", "left"),
        ("Qwen2", True, "sdpa", "left"),
        ("Qwen2", False, "eager", "right"),
        ("Qwen2", True, "eager", "both"),
    ],
)
def test_it_is_upstreams_actor(kind: str, tied: bool, attention: str, padding: str) -> None:
    model = causal_lm(kind, tied, attention)
    upstream, ours = actors(model)
    assert ours._plain_head() is model.get_output_embeddings()
    assert_same_model(upstream, ours, batch(padding))


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_the_temperature_scales_log_probs_and_entropies(temperature: float) -> None:
    model = causal_lm("Llama")
    upstream, ours = actors(model, temperature=temperature)
    data = batch("right", seed=1)
    assert_same_model(upstream, ours, data)
    if temperature != 1.0:
        assert not torch.allclose(run(ours, data)[1], run(actors(model, temperature=1.0)[1], data)[1], atol=0.01)


@pytest.mark.parametrize("attention", ["sdpa", varlen_attention.NAME])
@pytest.mark.parametrize("padding", ["right", "both"])
def test_packed_rows_do_not_see_each_other(padding: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's unpacked forward is the reference; torch's FlashAttention kernels have one in their place."""
    monkeypatch.setattr(varlen, "varlen_attn", reference)
    varlen_attention.register()
    model = causal_lm("Qwen2")
    data = batch(padding, seed=2)
    expected = run(actors(model)[0], data)
    model.set_attn_implementation(attention)
    for packed in actors(model, packing=True):
        found = run(packed, data)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-5)


def test_a_biased_head_keeps_its_bias() -> None:
    model = causal_lm("Llama")
    head = torch.nn.Linear(TINY["hidden_size"], VOCABULARY)
    model.set_output_embeddings(head)
    upstream, ours = actors(model)
    assert ours._plain_head() is head
    assert_same_model(upstream, ours, batch("right", seed=3))


def test_gradient_checkpointing_changes_nothing() -> None:
    model = causal_lm("Llama")
    upstream, ours = actors(model)
    data = batch("right", seed=4)
    expected = gradients(upstream, data)
    ours.gradient_checkpointing_enable()
    model.train()
    found = gradients(ours, data)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_the_head_comes_back_after_a_failure() -> None:
    model = causal_lm("Llama")
    _, ours = actors(model)
    data = batch("right", seed=7)
    with pytest.raises(IndexError):
        ours(**{**data, "sequences": data["sequences"] + VOCABULARY})
    assert model(data["sequences"]).logits.shape[-1] == VOCABULARY


# ── Where it steps aside ──


def test_an_architecture_with_something_behind_the_head_runs_upstreams_forward() -> None:
    model = causal_lm("Gemma2", tied=True, attention="eager", final_logit_softcapping=5.0)
    upstream, ours = actors(model)
    assert ours._plain_head() is None
    data = batch("right", seed=8)
    log_probs, entropy = run(ours, data)
    assert torch.equal(log_probs, run(upstream, data)[0])
    with torch.no_grad():
        logits = model(data["sequences"], attention_mask=data["attention_mask"]).logits.double() / TEMPERATURE
    assert logits.abs().max() <= 5 / TEMPERATURE + 1e-6
    distribution = torch.distributions.Categorical(logits=logits[:, :-1])
    mask = data["action_mask"]
    torch.testing.assert_close(entropy.double(), distribution.entropy() * mask, rtol=1e-4, atol=1e-5)
    expected = distribution.log_prob(data["sequences"][:, 1:]) * mask
    torch.testing.assert_close(log_probs.double(), expected, rtol=1e-4, atol=1e-5)


def test_an_adapter_on_the_head_runs_upstreams_forward() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    adapted = get_peft_model(causal_lm("Llama"), LoraConfig(r=2, target_modules=["q_proj", "lm_head"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    upstream, ours = actors(adapted)
    assert ours._plain_head() is None
    data = batch("right", seed=10)
    assert torch.equal(run(ours, data)[0], run(upstream, data)[0])


def test_adapters_inside_the_model_keep_the_plain_head() -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    adapted = get_peft_model(causal_lm("Llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    upstream, ours = actors(adapted)
    assert ours._plain_head() is not None
    data = batch("right", seed=11)
    torch.testing.assert_close(run(ours, data), run(upstream, data), rtol=1e-4, atol=1e-5)
