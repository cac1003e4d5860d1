"""Packed rows attend as they would alone, whatever the model; what torch's kernels lack is refused.

torch's kernels need a GPU. Without one, a reference with their signature stands in for them, and the real function is
called with tensors that have a shape and nothing else.
"""

from typing import Any

import pytest
import torch
from torch.nn.attention import varlen
from transformers import AutoModelForCausalLM, LlamaConfig

from openrlhf_gtpo.platform import varlen_attention
from tests.support.packed_rows import CONFIGS, LENGTHS, SIZES, check_rows, reference


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_packed_rows_attend_as_each_does_alone(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "varlen_attn", reference)
    check_rows(config, "cpu", torch.float32, 1e-5)


def test_the_call_fits_the_installed_torch() -> None:
    """Forward and backward, as far as shapes go."""
    assert varlen_attention.is_available()
    query = torch.empty(1, 4, 15, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty(1, 2, 15, 16, dtype=torch.bfloat16, device="meta", requires_grad=True) for _ in range(2))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    module = torch.nn.Identity()
    output, _ = varlen_attention.varlen_attention(module, query, key, value, None, position_ids=positions)
    assert output.shape == (1, 15, 4, 16)
    output.sum().backward()
    assert query.grad.shape == query.shape and key.grad.shape == value.grad.shape == key.shape


def test_a_torch_that_groups_heads_unasked_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 has no ``enable_gqa``; 2.10 has neither a window nor a scale."""
    called: dict[str, Any] = {}

    def of_2_11(*args: Any, scale: Any = None, window_size: Any = (-1, -1)) -> torch.Tensor:
        called.update(scale=scale, window_size=window_size)
        return args[0]

    rows = [torch.zeros(1, heads, 3, 8) for heads in (4, 2, 2)]
    asked = {"position_ids": torch.arange(3)[None], "scaling": 0.5, "sliding_window": 4}
    for function, available in ((of_2_11, True), (lambda query, is_causal=False: query, False)):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        assert varlen_attention.is_available() == available
        if available:
            output, _ = varlen_attention.varlen_attention(torch.nn.Identity(), *rows, None, **asked)
            assert called == {"scale": 0.5, "window_size": (3, 0)} and output.shape == (1, 3, 4, 8)


@pytest.mark.parametrize(
    "wanted",
    [
        {"attention_mask": torch.ones(1, 3)},
        {"dropout": 0.1},
        {"softcap": 50.0},
        {"s_aux": torch.zeros(4)},
        {"is_causal": False},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_what_the_kernels_lack_is_refused(wanted: dict[str, Any]) -> None:
    """Left out, it would change every log-prob a little."""
    rows = [torch.zeros(1, 2, 3, 8)] * 3
    call = {"attention_mask": None, "position_ids": torch.arange(3)[None]} | wanted
    with pytest.raises(ValueError, match="give --ds.attn_implementation sdpa, or install flash-attn"):
        varlen_attention.varlen_attention(torch.nn.Identity(), *rows, **call)


def test_padded_rows_are_refused_by_a_whole_model() -> None:
    varlen_attention.register()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES), attn_implementation=varlen_attention.NAME)
    mask = torch.tensor([[0, 1, 1]])
    with pytest.raises(ValueError, match="over packed rows"):
        model(torch.zeros(1, 3, dtype=torch.long), attention_mask=mask, use_cache=False)
