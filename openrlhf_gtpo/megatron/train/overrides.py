"""``--megatron.override FIELD=VALUE``: words of a command line to values of Megatron's ``TransformerConfig``.

Megatron is imported where it is asked, so that a command line without the flag does not wait for it.
"""

import dataclasses
import difflib
import enum
import math
import types
import typing
import warnings
from collections.abc import Sequence
from typing import Any

from openrlhf_gtpo.megatron.parallel.layout import SIZES

# What would contradict what the rest of the command line, the checkpoint or the engine says, and where to say it.
_OWNED: dict[str, str] = {name: f"give --megatron.{name}" for name in (*SIZES, "sequence_parallel")}
_OWNED |= {"recompute_granularity": "give --megatron.recompute"}
_OWNED |= {name: f"give --megatron.{name}" for name in ("fp8", "fp8_recipe", "fp8_param")}
_OWNED |= {
    "tp_only_amax_red": "replicas run different numbers of micro-batches, and cannot wait for each other's scales"
}
_OWNED |= dict.fromkeys(
    ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
    "give --megatron.num_layers_at_start_in_bf16 and --megatron.num_layers_at_end_in_bf16",
)
_OWNED |= dict.fromkeys(
    ("params_dtype", "pipeline_dtype", "autocast_dtype", "enable_autocast", "bf16", "fp16"), "give --ds.param_dtype"
)
_OWNED |= dict.fromkeys(
    (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
        *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "qk_l2_norm"),
        *("add_bias_linear", "add_qkv_bias", "gated_linear_unit", "activation_func", "rotary_interleaved"),
        *("apply_residual_connection_post_layernorm", "multi_latent_attention", "attention_output_gate"),
        *("experimental_attention_variant", "window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_type"),
        *("softmax_scale", "mtp_num_layers", "is_hybrid_model", "num_moe_experts", "moe_ffn_hidden_size"),
        *("moe_layer_freq", "moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax"),
        *("moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_latent_size"),
    ),
    "it comes from the checkpoint's config.json",
)
_OWNED |= dict.fromkeys(
    (
        *("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout", "expert_tensor_parallel_size"),
        *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "moe_extended_tp"),
        *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
        *("hierarchical_context_parallel_sizes", "hybrid_context_parallel", "max_seqlen_per_dp_cp_rank"),
    ),
    "layers, experts and sequences are split evenly over the sizes of --megatron.*_parallel_size",
)
_OWNED |= dict.fromkeys(
    (
        *("use_cpu_initialization", "perform_initialization", "init_model_with_meta_device", "variable_seq_lengths"),
        *("calculate_per_token_loss", "hidden_dropout", "attention_dropout"),
    ),
    "the training step relies on its value",
)

_TRUTH = {"true": True, "1": True, "false": False, "0": False}


class OverrideError(ValueError):
    """A ``FIELD=VALUE`` that names no field, one that is not free, or a value of the wrong type."""


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Field of ``TransformerConfig`` -> value, in the field's own type.

    Values: ``true`` or ``false``; a number; one of the field's choices; a member's name for an enumeration; items
    with commas between them for a list; ``none`` where the field may be empty.

    Raises:
        OverrideError: the first of ``words`` that cannot be used; the message says what could.
    """
    if not words:
        return {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this process lacks for training, which others do
        from megatron.core.transformer import TransformerConfig

    hints = typing.get_type_hints(TransformerConfig)
    fields = {field.name for field in dataclasses.fields(TransformerConfig) if not field.name.startswith("_")}
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise OverrideError(f"--megatron.override {word} has no value; write FIELD=VALUE.")
        if name not in fields:
            nearest = difflib.get_close_matches(name, fields, n=1, cutoff=0.5)
            hint = f"did you mean {nearest[0]}?" if nearest else "Megatron's documentation lists its fields."
            raise OverrideError(f"--megatron.override {word}: TransformerConfig has no field {name!r}; {hint}")
        if name in _OWNED:
            raise OverrideError(f"--megatron.override {word}: {name} cannot be set here; {_OWNED[name]}.")
        if name in values:
            raise OverrideError(f"--megatron.override {word}: {name} is given twice; leave one out.")
        values[name] = _value(word, text, hints[name])
    return values


def _value(word: str, text: str, hint: Any) -> Any:
    kinds = _alternatives(hint)
    if not all(map(_expressible, kinds)):
        raise OverrideError(f"--megatron.override {word}: the field takes a Python object, which no text can give.")
    for kind in sorted(kinds, key=lambda kind: _rank(kind, text)):
        try:
            return _read(text, kind)
        except ValueError:
            continue
    *most, last = [wanted for kind in kinds for wanted in _wanted(kind)]
    choices = f"{', '.join(most)} or {last}" if most else last
    raise OverrideError(f"--megatron.override {word}: {text!r} is not one of its values; give {choices}.")


def _alternatives(hint: Any) -> list[Any]:
    """The members of a union, or the type itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return list(typing.get_args(hint))
    return [hint]


def _expressible(kind: Any) -> bool:
    if _is_list(kind):
        return all(map(_expressible, typing.get_args(kind)))
    return kind in (bool, int, float, str, type(None)) or _choices(kind) is not None


def _is_list(kind: Any) -> bool:
    return typing.get_origin(kind) is list


def _rank(kind: Any, text: str) -> int:
    """Which of a union's types to try first: whatever text could mean comes last, lists before it where commas are."""
    order = [type(None), bool, int, float]
    if kind in order:
        return order.index(kind)
    if _is_list(kind):
        return 5 if "," in text else 7
    return 6 if kind is str else 4


def _read(text: str, kind: Any) -> Any:
    """``text`` as a ``kind``; ValueError where it is none."""
    if kind is type(None):
        if text.lower() != "none":
            raise ValueError
        return None
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise ValueError
        return _TRUTH[text.lower()]
    if kind is float:
        number = float(text)
        if not math.isfinite(number):
            raise ValueError
        return number
    if _is_list(kind):
        item = typing.get_args(kind)[0]
        return [_read(part.strip(), item) for part in text.split(",")] if text else []
    choices = _choices(kind)
    if choices is None:
        return kind(text)
    if text not in choices:
        raise ValueError
    return choices[text]


def _choices(kind: Any) -> dict[str, Any] | None:
    """The texts of a Literal's or an enumeration's values; None for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}
    return dict(kind.__members__) if isinstance(kind, type) and issubclass(kind, enum.Enum) else None


def _wanted(kind: Any) -> list[str]:
    names = {
        bool: ["true", "false"],
        int: ["a whole number"],
        float: ["a number"],
        str: ["text"],
        type(None): ["none"],
    }
    if _is_list(kind):
        return ["a list with commas between its items"]
    return names[kind] if kind in names else list(_choices(kind) or {})
