"""Megatron's description of a model, from Hugging Face's configuration and the run's options: sizes, layers, rotary
embedding."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import AutoConfig, PretrainedConfig

from openrlhf_gtpo.megatron.families import FAMILIES
from openrlhf_gtpo.megatron.model.layers import portable_layer_spec
from openrlhf_gtpo.megatron.parallel.layout import Layout


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's configuration with this package's additions.

    Fields:
        token_multiple: the number of packed tokens of a micro-batch on a rank is a multiple of this.
        portable_layers: True for this package's own layers, False for Transformer Engine's, where they are available.
        shares_prompts: the common beginning of a micro-batch's rows is computed once.
    """

    token_multiple: int = 1
    portable_layers: bool = True
    shares_prompts: bool = False


def read_config(source: str | Path) -> PretrainedConfig:
    """Read the checkpoint's configuration, and set the head size if only a default implies it."""
    config = AutoConfig.from_pretrained(source)
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    return config


def megatron_config(
    hf_config: PretrainedConfig, layout: Layout, dtype: torch.dtype, fields: dict[str, Any]
) -> PolicyConfig:
    """Make Megatron's configuration of the model ``hf_config`` (from :func:`read_config`).

    Args:
        dtype: of parameters and activations.
        fields: TransformerConfig fields that override the model's.
    """
    family = FAMILIES[hf_config.model_type]
    of_model = {
        "num_layers": hf_config.num_hidden_layers,
        "hidden_size": hf_config.hidden_size,
        "ffn_hidden_size": hf_config.intermediate_size,
        "num_attention_heads": hf_config.num_attention_heads,
        "num_query_groups": hf_config.num_key_value_heads,
        "kv_channels": hf_config.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf_config.rms_norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias,
        "qk_layernorm": family.qk_norm,
        "moe_token_dispatcher_type": "alltoall",
    }
    of_run = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.tensor_model_parallel_size,
        "variable_seq_lengths": True,
        "batch_p2p_comm": False,
    }
    return PolicyConfig(**{**of_model, **family.megatron(hf_config), **of_run, **fields})


def layer_spec(config: PolicyConfig) -> TransformerBlockSubmodules:
    """Return the decoder layers of this pipeline stage."""
    if config.portable_layers:
        return portable_layer_spec(config)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    if config.shares_prompts:
        from openrlhf_gtpo.megatron.model.fused_attention import SharedPromptAttention

        for layer in spec.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = SharedPromptAttention
    return spec


def rotary_arguments(hf_config: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments of Megatron's GPTModel for the model's rotary embedding."""
    rope = hf_config.rope_parameters
    arguments: dict[str, Any] = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    if FAMILIES[hf_config.model_type].partial_rotary:
        arguments["rotary_percent"] = rope["partial_rotary_factor"]
    if rope["rope_type"] == "linear":
        arguments["seq_len_interpolation_factor"] = rope["factor"]
    elif rope["rope_type"] == "llama3":
        arguments |= {"rope_scaling": True, "rope_scaling_factor": rope["factor"]}
    return arguments
