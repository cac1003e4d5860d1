"""Small models whose packed rows are compared with the same rows alone."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config

from openrlhf_gtpo.platform import varlen_attention

LENGTHS = (5, 1, 9)
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "as many key-value heads": Qwen2Config(**SIZES | {"num_key_value_heads": 4}),
    "a window of 4 tokens": MistralConfig(**SIZES, sliding_window=4),
}


def run(model: Any, tokens: torch.Tensor, position_ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Logits (T, V), and the gradients of a weighted sum of them."""
    model.zero_grad()
    logits = model(tokens[None], position_ids=position_ids[None], use_cache=False).logits[0]
    (logits * weights).sum().backward()
    return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def check_rows(config: Any, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Assert that packed rows have the logits and gradients that ``sdpa`` gives each row alone."""
    varlen_attention.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=varlen_attention.NAME).to(device, dtype)
    tokens = torch.randint(50, (sum(LENGTHS),), device=device)
    weights = torch.randn(sum(LENGTHS), 50, device=device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    packed = run(model, tokens, positions, weights)
    model.set_attn_implementation("sdpa")
    alone = [run(model, *row) for row in zip(*(x.split(LENGTHS) for x in (tokens, positions, weights)))]
    expected = [torch.cat([row[0] for row in alone]), *(sum(parts) for parts in list(zip(*alone))[1:])]
    for ours, theirs in zip(packed, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))
