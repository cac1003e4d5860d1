"""How many processes share a model, and which numbers a model allows. Pure arithmetic over its configuration.

The driver and its command lines use it before anything starts, so it imports neither torch nor megatron nor
transformers.
"""

import math
from dataclasses import dataclass
from typing import Any

from openrlhf_gtpo.errors import SettingError
from openrlhf_gtpo.megatron.families import FAMILIES

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")
RECOMPUTE = ("none", "selective", "full")  # activations that a backward pass recomputes

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)
_TP, _PP, _CP, _EP = (f"${name}" for name in SIZES)  # for a SettingError's sentence

# Megatron's RotaryEmbedding takes Llama 3's factor and fixes the rest of its scaling (megatron-core 0.16.1, 0.19.2:
# models/common/embeddings/rotary_pos_embedding.py, _apply_scaling). Can go once GPTModel passes the rest on.
_LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


class LayoutError(SettingError):
    """A layout that the model or the host does not allow, or a model that the Megatron actor does not support."""


class ModelError(LayoutError):
    """A model that this actor does not train at any layout."""


class WorldSizeError(LayoutError):
    """A number of processes that the layout does not divide."""


@dataclass(frozen=True)
class Layout:
    """Processes in each parallel dimension of one model replica; data parallelism takes the rest of the world.

    Fields:
        tensor_model_parallel_size: shares of every matrix (TP).
        pipeline_model_parallel_size: stages of consecutive layers (PP).
        context_parallel_size: shares of every sequence (CP).
        expert_model_parallel_size: shares of the experts (EP), taken from the data-parallel processes.
        sequence_parallel: shard activations between the matrices over TP too; has no effect at TP 1.

    Raises:
        LayoutError: a size below 1.
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        for name in SIZES:
            size = getattr(self, name)
            if size < 1:
                raise LayoutError(f"Expected ${name} >= 1, got {size}.")

    @property
    def model_parallel_size(self) -> int:
        """Processes of one model replica: TP × PP × CP."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """Model replicas among ``world_size`` processes.

        Raises:
            WorldSizeError: the processes do not divide evenly into replicas, or there are none.
        """
        if world_size < 1 or world_size % self.model_parallel_size:
            factors = f"{_TP} {self.tensor_model_parallel_size} × {_PP} {self.pipeline_model_parallel_size}"
            factors += f" × {_CP} {self.context_parallel_size}" if self.context_parallel_size > 1 else ""
            raise WorldSizeError(
                f"{world_size} process{'es' * (world_size != 1)} cannot be split into model replicas of "
                f"{self.model_parallel_size} ({factors}); give a multiple of {self.model_parallel_size}."
            )
        return world_size // self.model_parallel_size


def check_layout(hf_config: Any, layout: Layout, world_size: int) -> None:
    """Refuse a layout that cannot run, before any process starts.

    Args:
        hf_config: the checkpoint's configuration, as ``transformers`` reads it.
        layout: the parallel sizes asked for.
        world_size: processes (GPUs) that the model gets.

    Raises:
        LayoutError: the first thing that cannot work, in one sentence with the setting, the model's number and what is
            legal; a :class:`WorldSizeError` if the sizes fit the model but not ``world_size``.
    """
    check_architecture(hf_config)
    for name, number in _sharded_over_tensor_parallel(hf_config):
        if number % layout.tensor_model_parallel_size:
            raise LayoutError(
                f"{_TP} {layout.tensor_model_parallel_size} does not divide this model's {number} {name}; it can be "
                f"{_either(legal_tensor_parallel_sizes(hf_config))}."
            )
    if hf_config.num_hidden_layers % layout.pipeline_model_parallel_size:
        raise LayoutError(
            f"{_PP} {layout.pipeline_model_parallel_size} does not divide this model's {hf_config.num_hidden_layers} "
            f"layers; it can be {_either(legal_pipeline_parallel_sizes(hf_config))}."
        )
    _check_world_size(hf_config, layout, world_size)
    _check_experts(hf_config, layout, layout.data_parallel_size(world_size))


def legal_tensor_parallel_sizes(hf_config: Any) -> list[int]:
    """TP sizes that divide the model's attention heads, key-value heads and MLP widths, in ascending order."""
    return _divisors(math.gcd(*(number for _, number in _sharded_over_tensor_parallel(hf_config))))


def legal_pipeline_parallel_sizes(hf_config: Any) -> list[int]:
    """PP sizes that give every stage the same number of layers, ascending."""
    return _divisors(hf_config.num_hidden_layers)


def legal_layouts(hf_config: Any, world_size: int, context_parallel_size: int = 1) -> list[tuple[int, int]]:
    """(TP, PP) pairs that the model allows and that split ``world_size`` processes into whole replicas, ascending."""
    return [
        (tensor, pipeline)
        for tensor in legal_tensor_parallel_sizes(hf_config)
        for pipeline in legal_pipeline_parallel_sizes(hf_config)
        if world_size % (tensor * pipeline * context_parallel_size) == 0
    ]


def check_architecture(hf_config: Any) -> None:
    """Refuse a model whose mathematics the Megatron actor would not reproduce.

    Raises:
        ModelError: an architecture, attention, rotary embedding or storage format outside of what is supported.
    """
    kind = hf_config.model_type
    if kind not in FAMILIES:
        raise ModelError(
            f"the Megatron actor does not support the architecture {kind!r}; it supports "
            f"{', '.join(FAMILIES)}, and the DeepSpeed actor runs the others."
        )
    if getattr(hf_config, "quantization_config", None) is not None:
        raise ModelError(
            "the Megatron actor trains in full precision, and this checkpoint is quantized "
            "(quantization_config); give the checkpoint that it was made from."
        )
    window = _sliding_window(hf_config)
    if window is not None:
        raise ModelError(
            f"the Megatron actor has no sliding-window attention, which this {kind} model uses over {window} "
            f"of its {hf_config.max_position_embeddings} positions; use the DeepSpeed actor."
        )
    _check_rope(hf_config)
    if _experts(hf_config) and hf_config.num_experts_per_tok == 1 and hf_config.norm_topk_prob:
        raise ModelError(
            f"the Megatron actor does not train this {kind} model, whose router learns nothing: it gives each token "
            "one expert (num_experts_per_tok 1) with the weight 1 (norm_topk_prob); use the DeepSpeed actor."
        )
    for name, expected in _assumed(hf_config).items():
        value = getattr(hf_config, name, expected)
        if value != expected:
            raise ModelError(
                f"the Megatron actor builds {kind} models with {name} {expected!r}, and this one has {value!r}; "
                "use the DeepSpeed actor."
            )


def _assumed(hf_config: Any) -> dict[str, Any]:
    """The values that the converted model takes for granted, by configuration entry."""
    of_all = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "is_causal": True}
    return of_all | FAMILIES[hf_config.model_type].assumed


def _sliding_window(hf_config: Any) -> int | None:
    """The attention window in tokens; None if attention always sees every earlier position."""
    switches = FAMILIES[hf_config.model_type].window_switches
    window = getattr(hf_config, "sliding_window", None)
    if window is None or ("use_sliding_window" in switches and not getattr(hf_config, "use_sliding_window", True)):
        return None
    layers = getattr(hf_config, "layer_types", None) if "layer_types" in switches else None
    beyond = window >= hf_config.max_position_embeddings and _rope(hf_config)[0] == "default"  # a scaled one goes on
    return None if beyond or (layers and "sliding_attention" not in layers) else window


def _rope(hf_config: Any) -> tuple[str, dict[str, Any]]:
    """The type of a model's rotary embedding, and its entries."""
    # transformers 5 says rope_parameters, earlier checkpoints rope_scaling; "type" is the oldest spelling.
    rope = getattr(hf_config, "rope_parameters", None) or getattr(hf_config, "rope_scaling", None) or {}
    return rope.get("rope_type", rope.get("type")) or "default", rope


def _check_rope(hf_config: Any) -> None:
    kind, rope = _rope(hf_config)
    if kind not in SUPPORTED_ROPE_TYPES:
        raise ModelError(
            f"the Megatron actor does not support this model's rotary embedding {kind!r} (rope_type); it supports "
            f"{', '.join(SUPPORTED_ROPE_TYPES)}."
        )
    for name, expected in _LLAMA3_ROPE.items() if kind == "llama3" else ():
        if rope.get(name, expected) != expected:
            raise ModelError(
                f"the Megatron actor supports the rotary embedding llama3 only with {name} {expected}, and this "
                f"model has {rope[name]}; use the DeepSpeed actor."
            )


def _sharded_over_tensor_parallel(hf_config: Any) -> list[tuple[str, int]]:
    """The dimensions that TP must divide, and the model's number of each."""
    heads = hf_config.num_attention_heads
    groups = getattr(hf_config, "num_key_value_heads", None) or heads
    sharded = [("attention heads", heads), ("key-value heads", groups)]
    if _experts(hf_config):
        return [*sharded, ("columns in an expert (moe_intermediate_size)", hf_config.moe_intermediate_size)]
    return [*sharded, ("columns in the MLP (intermediate_size)", hf_config.intermediate_size)]


def _check_world_size(hf_config: Any, layout: Layout, world_size: int) -> None:
    try:
        layout.data_parallel_size(world_size)
    except WorldSizeError as error:
        legal = legal_layouts(hf_config, world_size, layout.context_parallel_size) if world_size > 0 else []
        if not legal:
            raise
        by_tensor: dict[int, list[int]] = {}
        for tensor, pipeline in legal:
            by_tensor.setdefault(tensor, []).append(pipeline)
        choices = "; ".join(f"TP {tensor} with PP {_either(sizes)}" for tensor, sizes in by_tensor.items())
        raise WorldSizeError(f"{error.sentence[:-1]}, or with {world_size} choose {choices}.") from None


def _check_experts(hf_config: Any, layout: Layout, data_parallel_size: int) -> None:
    size, experts = layout.expert_model_parallel_size, _experts(hf_config)
    if experts and layout.tensor_model_parallel_size > 1 and not layout.sequence_parallel:
        raise LayoutError(
            f"{_TP} {layout.tensor_model_parallel_size} with a mixture of experts needs $sequence_parallel, "
            "without which Megatron does not train one; add it."
        )
    if size == 1:
        return
    if not experts:
        raise LayoutError(
            f"{_EP} {size} needs experts, and this {hf_config.model_type} model has none; leave it at 1."
        )
    if experts % size or data_parallel_size % size:
        raise LayoutError(
            f"{_EP} {size} must divide this model's {experts} experts and the data-parallel size "
            f"{data_parallel_size}; it can be {_either(_divisors(math.gcd(experts, data_parallel_size)))}."
        )


def _experts(hf_config: Any) -> int:
    """Number of experts in each layer, 0 for a dense model."""
    if not FAMILIES[hf_config.model_type].has_experts:
        return 0
    return getattr(hf_config, "num_experts", None) or getattr(hf_config, "num_local_experts", None) or 0


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _either(sizes: list[int]) -> str:
    """The sizes in words, such as "1, 2 or 4"."""
    *most, last = map(str, sizes)
    return f"{', '.join(most)} or {last}" if most else last
