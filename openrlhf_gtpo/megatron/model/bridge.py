"""mbridge's conversion between Hugging Face checkpoints and Megatron parameters, adapted to transformers 5.

mbridge 0.15.1 knows the names and layouts of each architecture; this module adds the configuration fields that its
models read, layers for hosts without Transformer Engine, and tied heads under pipeline parallelism.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mbridge.models.llama import LLaMABridge
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import AutoConfig, PretrainedConfig

from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.model_shape import VOCABULARY_MULTIPLE

EXPERTS = ".mlp.experts.linear_fc"  # in Megatron's names of expert weights, and in no others


def read_config(source: str | Path) -> PretrainedConfig:
    """The checkpoint's configuration, with the head size that mbridge reads where only a default implies it."""
    config = AutoConfig.from_pretrained(source)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration with this package's additions.

    Fields:
        token_multiple: the number of packed tokens of a micro-batch on a rank is a multiple of this.
        portable_layers: True for this package's own layers, False for Transformer Engine's, where they are available.
        shares_prompts: rows of a micro-batch have what they have in common computed once.
    """

    token_multiple: int = 1
    portable_layers: bool = True
    shares_prompts: bool = False


class _AdaptedBridge:
    """The part that all architectures' bridges have in common; mixed in before mbridge's class."""

    TransformerConfigClass = PolicyConfig
    hf_config: Any
    mpu: Any
    config: Any

    def _adjust_mapping_for_shared_weights(self) -> None:
        # Copied because mbridge changes the class's table, which the next model in this process would inherit (0.15.1,
        # models/qwen2.py, _adjust_mapping_for_shared_weights). Can go once mbridge copies it.
        self._DIRECT_MAPPING = dict(self._DIRECT_MAPPING)  # type: ignore[has-type]
        if self.hf_config.tie_word_embeddings:
            self._DIRECT_MAPPING["output_layer.weight"] = "model.embed_tokens.weight"

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        if not self.config.portable_layers:
            spec = super()._get_transformer_layer_spec(vp_stage)  # type: ignore[misc]
            if self.config.shares_prompts:
                from openrlhf_gtpo.megatron.model.fused_attention import SharedPromptAttention

                for layer in spec.layer_specs:
                    layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention
            return spec
        from openrlhf_gtpo.megatron.model.layers import portable_layer_spec

        return portable_layer_spec(self.config, vp_stage)

    def _get_gptmodel_args(self) -> dict[str, Any]:
        # mbridge's reads the fields of transformers 4. Can go once it reads ``rope_parameters`` (mbridge 0.15.1,
        # core/llm_bridge.py, _get_gptmodel_args).
        rope = self.hf_config.rope_parameters
        options: dict[str, Any] = {}
        if rope["rope_type"] == "linear":
            options = {"seq_len_interpolation_factor": rope["factor"]}
        elif rope["rope_type"] == "llama3":
            options = {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
        return {
            "vocab_size": self.hf_config.vocab_size,
            "max_sequence_length": self.hf_config.max_position_embeddings,
            "position_embedding_type": "rope",
            "rotary_base": rope["rope_theta"],
        } | options


def _adapted(bridge: type) -> type:
    """mbridge's ``bridge`` with ``_AdaptedBridge`` mixed in, for a family that needs no more."""
    return type(bridge.__name__, (_AdaptedBridge, bridge), {})


class _Qwen3Moe(_AdaptedBridge, Qwen3MoEBridge):
    """Routes as Transformers and vLLM do: logits in the model's dtype, their softmax in float32, no balancing loss.

    Without norm_topk_prob Megatron chooses experts by that softmax in the model's dtype (megatron-core 0.16.1,
    transformer/moe/moe_utils.py), and so others in near-ties: for random bf16 logits with a deviation of 1 and 64
    experts, in 0.2 % of tokens.
    """

    def _build_config(self) -> Any:
        return self._build_base_config(
            qk_layernorm=True,
            num_moe_experts=self.hf_config.num_experts,
            moe_ffn_hidden_size=self.hf_config.moe_intermediate_size,
            moe_grouped_gemm=True,
            moe_router_topk=self.hf_config.num_experts_per_tok,
            moe_router_load_balancing_type="none",
            # The softmax over the chosen experts equals the softmax over all of them, renormalized.
            moe_router_pre_softmax=not self.hf_config.norm_topk_prob,
        )


_BRIDGES: dict[str, Any] = {
    "llama": _adapted(LLaMABridge),
    "mistral": _adapted(LLaMABridge),  # the same names and layout; its sliding window must be off
    "qwen2": _adapted(Qwen2Bridge),
    "qwen3": _adapted(Qwen3Bridge),
    "qwen3_moe": _Qwen3Moe,
}


def make_bridge(config: PretrainedConfig, layout: Layout, dtype: torch.dtype, fields: dict[str, Any]) -> Any:
    """mbridge's bridge for ``config`` (from :func:`read_config`) on the groups of ``layout``, which already exist.

    Args:
        fields: TransformerConfig fields that override what the bridge derives.
    """
    assert parallel_state.get_tensor_model_parallel_world_size() == layout.tensor_model_parallel_size
    bridge = _BRIDGES[config.model_type](
        config, dtype=dtype, make_vocab_size_divisible_by=VOCABULARY_MULTIPLE * layout.tensor_model_parallel_size
    )
    bridge.set_extra_args(**fields)
    return bridge
