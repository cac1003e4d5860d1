"""Shapes of the models that benchmarks build with random weights, and the arithmetic that a decoder of such a shape does."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from openrlhf_gtpo.integration.errors import UsageError
from openrlhf_gtpo.megatron.layout import LayoutError, check_architecture
from openrlhf_gtpo.planner import shape

_QWEN2_5 = {
    "model_type": "qwen2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
}


def _qwen2_5(hidden: int, mlp: int, layers: int, heads: int, groups: int, vocabulary: int, tied: bool) -> dict:
    return _QWEN2_5 | {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


# Qwen2.5's published configurations; every width of ``tiny`` is a multiple of 128 too, so that FP8 takes it.
PRESETS = {
    "tiny": _qwen2_5(256, 512, 2, 4, 2, 512, False),
    "3b": _qwen2_5(2048, 11008, 36, 16, 2, 151936, True),
    "7b": _qwen2_5(3584, 18944, 28, 28, 4, 152064, False),
    "32b": _qwen2_5(5120, 27648, 64, 40, 8, 152064, False),
}


def read_shape(name: str, layers: int | None = None) -> Any:
    """Transformers' configuration of the model ``name``: a preset, a ``config.json``, or a folder with one.

    Args:
        layers: how many decoder layers it shall have; None for its own number.

    Raises:
        UsageError: no such preset or file, or an architecture whose layers the Megatron actor or :func:`decoder_flops`
            does not know.
    """
    from transformers import AutoConfig

    fields = dict(PRESETS[name]) if name in PRESETS else _read(name)
    if layers is not None:
        if layers < 1:
            raise UsageError(f"--layers is {layers}; it must be at least 1.")
        fields["num_hidden_layers"] = layers
        fields.pop("layer_types", None)  # one entry a layer; Transformers fills it in again
    try:
        config = AutoConfig.for_model(**fields)
        check_architecture(config)
    except (LayoutError, ValueError, TypeError) as error:
        raise UsageError(f"{name}: {error}") from error
    if getattr(config, "num_experts", None):
        raise UsageError(
            f"{name}: a mixture of experts ({config.model_type}) cannot be measured here, dense models can."
        )
    return config


def decoder_flops(config: Any, lengths: Iterable[int]) -> int:
    """:func:`openrlhf_gtpo.planner.shape.decoder_flops` of Transformers' configuration ``config``."""
    return shape.decoder_flops(shape.ModelShape.of(config), lengths)


def forward_flops(config: Any, lengths: Iterable[int], projected: int) -> int:
    """:func:`openrlhf_gtpo.planner.shape.forward_flops` of Transformers' configuration ``config``; the LM head projects
    ``projected`` tokens."""
    return shape.forward_flops(shape.ModelShape.of(config), lengths, projected)


def dense_config(model: str) -> Any | None:
    """Transformers' configuration of a checkpoint; None where :func:`forward_flops` does not know its layers. Code that
    the checkpoint brings is not run."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        check_architecture(config)
    except ValueError:  # a LayoutError, or a configuration that only code of its own can read
        return None
    return None if getattr(config, "num_experts", None) else config


def _read(name: str) -> dict[str, Any]:
    path = Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError):
        fields = None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise UsageError(
            f"{name!r} is neither {', '.join(PRESETS)} nor a Hugging Face config.json or a folder with one."
        )
    return fields
