"""A Hugging Face ``config.json`` without transformers: its fields, with the defaults that its architecture's class has."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.parallel.layout import LayoutError, check_architecture

_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
# Of transformers' configuration classes, where a published config.json may leave a field out and it matters here.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "head_dim": 128},
    "qwen3_moe": {"use_sliding_window": False, "norm_topk_prob": False, "num_experts_per_tok": 8},
}


def read_model_config(source: str | Path) -> SimpleNamespace:
    """The fields of ``source``: a ``config.json``, or a folder with one.

    Raises:
        UsageError: there is none, or it is of a model that the Megatron actor does not train.
    """
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        fields = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(
            f"--model {source}: there is no config.json to read ({error.strerror}); give a Hugging Face checkpoint's "
            "folder, or its config.json."
        ) from error
    except ValueError as error:
        raise UsageError(f"--model {source}: {path} is not JSON ({error}).") from error
    return model_config(fields, str(source))


def model_config(fields: Any, source: str) -> SimpleNamespace:
    """``fields`` of a ``config.json``, checked.

    Args:
        source: what messages call it.

    Raises:
        UsageError: see :func:`read_model_config`.
    """
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise UsageError(f"--model {source}: this is no Hugging Face config.json (no model_type in it).")
    fields = _DEFAULTS.get(fields["model_type"], {}) | fields
    config = SimpleNamespace(**fields)
    try:
        # A window is compared with the number of positions.
        check_architecture(SimpleNamespace(**({"max_position_embeddings": math.inf} | fields)))
    except LayoutError as error:
        raise UsageError(f"--model {source}: {error}") from error
    needed = (*_NEEDED, "num_experts", "moe_intermediate_size") if config.model_type == "qwen3_moe" else _NEEDED
    for name in needed:
        value = fields.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(
                f"--model {source}: its config.json has {name} {value!r}, and a model needs a whole number."
            )
    return config
