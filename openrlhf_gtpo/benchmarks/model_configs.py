"""Configurations of the models that benchmarks build with random weights, and checkpoints of such."""

import json
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.parallel.layout import LayoutError, check_architecture
from openrlhf_gtpo.model_shape import PRESETS


def read_shape(name: str, layers: int | None = None) -> Any:
    """Transformers' configuration of the model ``name``: a preset, a ``config.json``, or a folder with one.

    Args:
        layers: how many decoder layers it shall have; None for its own number.

    Raises:
        UsageError: no such preset or file, or an architecture whose layers the Megatron actor or
            :func:`openrlhf_gtpo.model_shape.decoder_flops` does not know.
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


def write_random_checkpoint(config: Any, folder: Path, seed: int) -> None:
    """Write bfloat16 weights of a model of ``config`` (two bytes a parameter) and a tokenizer of two tokens."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
