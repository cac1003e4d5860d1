"""The model families of the Megatron actor, a table each: what tensors of a checkpoint Megatron's parameters are made
of, how tensor parallelism cuts them, and what is read from the configuration.

Data, since drivers and the planner read it without torch; ``model/conversion.py`` goes by it in both directions.
docs/megatron.md says how to add a family.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Weight:
    """One of Megatron's parameters, as tensors of a checkpoint.

    Fields:
        names: of the tensors; a layer's without ``model.layers.N.``; ``{expert}`` stands for an expert's number.
        cut: the dimension along which TP cuts each matrix; None if every rank has all of it.
        rows: what the parameter's rows are. ``qkv``: group by group, the group's queries, its key and its value;
            ``gate_up``: on each rank its rows of the gate, then of the up projection; ``vocabulary``: a row per token,
            padded for TP; ``plain``: the tensor's. A checkpoint has a tensor for each of the matrices q, k, v, or gate
            and up, or a single one in which they follow each other.
    """

    names: tuple[str, ...]
    cut: int | None = None
    rows: Literal["plain", "qkv", "gate_up", "vocabulary"] = "plain"

    @property
    def is_stacked(self) -> bool:
        """True if one tensor has several matrices."""
        return self.rows in ("qkv", "gate_up") and len(self.names) == 1


@dataclass(frozen=True)
class Family:
    """What this package knows about the models of one ``model_type``.

    Fields:
        weights: by Megatron's names; a layer's without ``decoder.layers.N.``, an expert's without its number.
        megatron: fields of Megatron's TransformerConfig that follow from the model's configuration, besides sizes.
        assumed: entries of the configuration that the conversion relies on; other values are refused.
        defaults: of Transformers' configuration class, for entries that matter here and that config.json may omit.
        window_switches: entries by which Transformers 5.15 lets a model have a ``sliding_window`` and not use it.
        partial_rotary: only the ``partial_rotary_factor`` of a head is rotated.
    """

    weights: dict[str, Weight]
    megatron: Callable[[Any], dict[str, Any]] = lambda hf_config: {}
    assumed: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    window_switches: tuple[str, ...] = ()
    partial_rotary: bool = False

    @property
    def qkv_bias(self) -> bool:
        """Query, key and value have biases."""
        return "self_attention.linear_qkv.bias" in self.weights

    @property
    def qk_norm(self) -> bool:
        """Query and key are normalized head by head."""
        return "self_attention.q_layernorm.weight" in self.weights

    @property
    def has_experts(self) -> bool:
        """Every layer is a mixture of experts."""
        return "mlp.router.weight" in self.weights

    @property
    def is_stacked(self) -> bool:
        """Some tensors of the checkpoint have several matrices."""
        return any(weight.is_stacked for weight in self.weights.values())


def _whole(name: str) -> Weight:
    return Weight((name,))


def _inputs(name: str) -> Weight:
    return Weight((name,), cut=1)


def _vocabulary(name: str) -> Weight:
    return Weight((name,), cut=0, rows="vocabulary")


def _qkv(*names: str) -> Weight:
    return Weight(names, cut=0, rows="qkv")


def _gate_up(*names: str) -> Weight:
    return Weight(names, cut=0, rows="gate_up")


_ATTENTION = {
    "embedding.word_embeddings.weight": _vocabulary("model.embed_tokens.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _whole("input_layernorm.weight"),
    "self_attention.linear_qkv.weight": _qkv(
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"
    ),
    "self_attention.linear_proj.weight": _inputs("self_attn.o_proj.weight"),
    "decoder.final_layernorm.weight": _whole("model.norm.weight"),
    "output_layer.weight": _vocabulary("lm_head.weight"),
}
_LLAMA = _ATTENTION | {
    "mlp.linear_fc1.layer_norm_weight": _whole("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": _gate_up("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": _inputs("mlp.down_proj.weight"),
}
_QKV_BIAS = {
    "self_attention.linear_qkv.bias": _qkv("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
}
_QK_NORM = {
    "self_attention.q_layernorm.weight": _whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _whole("self_attn.k_norm.weight"),
}
_STACKED = {
    "self_attention.linear_qkv.weight": _qkv("self_attn.qkv_proj.weight"),
    "mlp.linear_fc1.weight": _gate_up("mlp.gate_up_proj.weight"),
}
_EXPERTS = {
    "pre_mlp_layernorm.weight": _whole("post_attention_layernorm.weight"),
    "mlp.router.weight": _whole("mlp.gate.weight"),
    "mlp.experts.linear_fc1.weight": _gate_up(
        "mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"
    ),
    "mlp.experts.linear_fc2.weight": _inputs("mlp.experts.{expert}.down_proj.weight"),
}
_NO_WINDOW = {"use_sliding_window": False}


def _rotate_smollm3(hf_config: Any) -> dict[str, Any]:
    """The layers without a rotary embedding, which are marked with 1 here, and with 0 by Hugging Face."""
    rotated = hf_config.no_rope_layers[: hf_config.num_hidden_layers]
    return {"no_rope_freq": [0 if layer else 1 for layer in rotated]}


def _route_qwen3(hf_config: Any) -> dict[str, Any]:
    """Routing as in Transformers and vLLM: logits in the model's dtype, their softmax in float32, no balancing loss.

    Without norm_topk_prob megatron-core 0.16.1 chooses experts by that softmax in the model's dtype
    (transformer/moe/moe_utils.py), and so others in near-ties: for random bf16 logits with a deviation of 1 and 64
    experts, in 0.2 % of tokens. 0.19.2 chooses as Transformers does.
    """
    return {
        "num_moe_experts": hf_config.num_experts,
        "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
        "moe_grouped_gemm": True,
        "moe_router_topk": hf_config.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        # The softmax over the chosen experts equals the softmax over all of them, renormalized.
        "moe_router_pre_softmax": not hf_config.norm_topk_prob,
    }


FAMILIES = {  # by Hugging Face's model_type
    "llama": Family(_LLAMA),
    "mistral": Family(_LLAMA, defaults={"num_key_value_heads": 8, "sliding_window": 4096}),
    "qwen2": Family(
        _LLAMA | _QKV_BIAS,
        defaults=_NO_WINDOW | {"num_key_value_heads": 32},
        window_switches=("use_sliding_window", "layer_types"),
    ),
    "qwen3": Family(
        _LLAMA | _QK_NORM,
        defaults=_NO_WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
        window_switches=("use_sliding_window", "layer_types"),
    ),
    "phi3": Family(
        _LLAMA | _STACKED,
        assumed={"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        partial_rotary=True,
    ),
    "smollm3": Family(
        _LLAMA,
        megatron=_rotate_smollm3,
        defaults=_NO_WINDOW | {"num_key_value_heads": 4, "tie_word_embeddings": True},
        window_switches=("use_sliding_window", "layer_types"),
    ),
    "qwen3_moe": Family(
        _ATTENTION | _QK_NORM | _EXPERTS,
        megatron=_route_qwen3,
        assumed={"decoder_sparse_step": 1, "mlp_only_layers": []},
        defaults=_NO_WINDOW | {"num_key_value_heads": 4, "norm_topk_prob": False, "num_experts_per_tok": 8},
        window_switches=("use_sliding_window",),
    ),
}
