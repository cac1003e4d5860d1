"""``--megatron.override`` and ``--megatron.ddp FIELD=VALUE``: turns words of a command line into values of Megatron's
``TransformerConfig`` and ``DistributedDataParallelConfig``.

Megatron is imported only when it is needed, so that a command line without the flag does not wait for it.
"""

import dataclasses
import difflib
import importlib
import typing
import warnings
from collections.abc import Sequence
from typing import Any, Literal

from openrlhf_gtpo.errors import UsageError, one_line
from openrlhf_gtpo.megatron.parallel.layout import SIZES

# Fields that would contradict the rest of the command line, the checkpoint or the engine, after the remedy or reason.
_CONTRADICTING = {
    "give --megatron.recompute": "recompute_granularity",
    "give --megatron.num_layers_at_start_in_bf16 and --megatron.num_layers_at_end_in_bf16": (
        "first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16"
    ),
    "give --ds.param_dtype": "params_dtype pipeline_dtype autocast_dtype enable_autocast bf16 fp16",
    "it comes from the checkpoint's config.json": (
        "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels normalization "
        "layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm add_bias_linear add_qkv_bias "
        "gated_linear_unit activation_func activation_func_clamp_value glu_linear_offset rotary_interleaved "
        "apply_residual_connection_post_layernorm "
        "multi_latent_attention attention_output_gate experimental_attention_variant window_size "
        "window_attn_skip_freq no_rope_freq softmax_type softmax_scale mtp_num_layers is_hybrid_model "
        "num_moe_experts moe_ffn_hidden_size moe_layer_freq moe_router_topk moe_router_score_function "
        "moe_router_pre_softmax moe_shared_expert_intermediate_size moe_shared_expert_gate moe_latent_size"
    ),
    "the engines route as the checkpoint's config.json says": (
        "moe_input_jitter_eps moe_router_force_load_balancing moe_expert_capacity_factor "
        "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk moe_apply_probs_on_input"
    ),
    # Megatron multiplies the router's own losses by their tokens to make up for a division of the whole gradient that
    # the policy's loss has already done (megatron-core 0.16.1, transformer/moe/router.py,
    # attach_and_log_load_balancing_loss); by sinkhorn it routes only in training.
    "the actor does not balance experts": "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff",
    "layers, experts and sequences are split evenly over the sizes of --megatron.*_parallel_size": (
        "virtual_pipeline_model_parallel_size pipeline_model_parallel_layout expert_tensor_parallel_size "
        "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage moe_extended_tp "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank"
    ),
    "replicas run different numbers of micro-batches, and cannot wait for each other's scales": "tp_only_amax_red",
    "the training step relies on its value": (
        "use_cpu_initialization perform_initialization init_model_with_meta_device variable_seq_lengths "
        "calculate_per_token_loss hidden_dropout attention_dropout"
    ),
} | {f"give --megatron.{name}": name for name in (*SIZES, "sequence_parallel", "fp8", "fp8_recipe", "fp8_param")}
_CONTRADICTING_OF_DDP = {
    "give --megatron.use_distributed_optimizer": "use_distributed_optimizer",
    "give --megatron.fp8_param": "fp8_param_gather",
    "optimizer states are sharded over all replicas": "num_distributed_optimizer_instances",
    "each pipeline stage gathers its own weights": "align_param_gather",
    "the training step relies on its value": "grad_reduce_in_fp32 average_in_collective delay_wgrad_compute",
    "it belongs to Megatron's FSDP or to MXFP8, which the actor does not use": (
        "use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy "
        "gradient_reduce_div_fusion suggested_communication_unit_size preserve_fp32_weights keep_fp8_transpose_cache "
        "fsdp_double_buffer fsdp_manual_registration reuse_grad_buf_for_mxfp8_param_ag"
    ),
}
# For each flag: the dataclass in megatron.core, and its fields that the user may not set.
FLAGS = {
    "override": ("transformer", "TransformerConfig", _CONTRADICTING),
    "ddp": ("distributed", "DistributedDataParallelConfig", _CONTRADICTING_OF_DDP),
}


def parse_overrides(words: Sequence[str], flag: str = "override") -> dict[str, Any]:
    """Field of ``flag``'s dataclass -> value, in the field's own type.

    Values: ``true`` or ``false``; a number; one of the field's choices; a member's name for an enumeration; items
    with commas between them for a list; ``none`` if the field may be empty.

    Raises:
        UsageError: the first of ``words`` that cannot be used; the message says what could.
    """
    if not words:
        return {}
    module, name_of_config, contradicting = FLAGS[flag]
    refused = {name: reason for reason, names in contradicting.items() for name in names.split()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what this process lacks for training, which others do
        config = getattr(importlib.import_module(f"megatron.core.{module}"), name_of_config)

    hints = typing.get_type_hints(config)
    fields = {field.name for field in dataclasses.fields(config) if not field.name.startswith("_")}
    values: dict[str, Any] = {}
    for word in words:
        shown = f"--megatron.{flag} {word}"
        name, _, text = word.partition("=")
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else "Megatron's documentation lists its fields."
            raise UsageError(f"{shown}: {name_of_config} has no field {name!r}; {hint}")
        if name in refused:
            raise UsageError(f"{shown}: {name} cannot be set here; {refused[name]}.")
        values[name] = _value(shown, text, hints[name])
    return values


def _value(shown: str, text: str, hint: Any) -> Any:
    """``text`` as a value of the type ``hint``: the first of its readings that pydantic takes."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError

    members = getattr(hint, "__members__", None)  # of an enumeration, whose values may be any
    kind: Any = Literal[tuple(members)] if members else hint
    adapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))
    items = [item.strip() for item in text.split(",") if text]
    readings = [*([None] if text.lower() == "none" else []), *([items, text] if "," in text else [text, items])]
    reasons: list[str] = []
    for reading in readings:
        try:
            value = adapter.validate_python(reading)
        except ValidationError as error:
            reasons = reasons or [one_line(detail["msg"]) for detail in error.errors()]
        else:
            return members[value] if members else value
    or_none = ", or none" if type(None) in typing.get_args(hint) else ""
    raise UsageError(f"{shown}: {'; '.join(dict.fromkeys(reasons))}{or_none}.")
