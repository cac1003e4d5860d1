"""Small models whose packed rows are compared with the same rows alone, and what stands in for torch's kernels on a
CPU."""

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


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """``torch.nn.attention.varlen.varlen_attn`` as its documentation says, row by row."""
    assert cu_seq_q.dtype == torch.int32 and torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k == int(cu_seq_q.diff().max()) and (enable_gqa or query.shape[1] == key.shape[1])
    left, right = window_size
    rows = []
    for start, end in zip(cu_seq_q.tolist(), cu_seq_q.tolist()[1:]):
        behind = torch.arange(end - start)[:, None] - torch.arange(end - start)
        seen = (behind >= -right) & ((behind <= left) if left >= 0 else True)
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        attend = torch.nn.functional.scaled_dot_product_attention
        rows.append(attend(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(rows)


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
