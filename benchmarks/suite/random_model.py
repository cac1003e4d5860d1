"""A model of a given shape with random weights, for measurements without a checkpoint."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.megatron.fp8 import weights as fp8_weights
from openrlhf_gtpo.megatron.model.adapters import is_adapter
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model

WEIGHT_STD = 0.02  # Qwen2.5's initializer_range


@torch.no_grad()
def random_model(config: Mapping[str, Any], options: ModelOptions, seed: int) -> LoadedModel:
    """Make this rank's part of a model with random weights, on the groups of ``groups.initialize``.

    Matrices are normal with a standard deviation of 0.02, norms 1 and biases 0. The same seed and layout give the same
    weights, with and without FP8.

    Args:
        config: the contents of a Hugging Face ``config.json``, including its ``model_type``.

    Raises:
        LayoutError: this process's device does not support the requested FP8.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        model = load_model(folder, options, with_weights=False)
    with fp8_weights.loading(model.stage):
        parameters = dict(model.stage.named_parameters())
        generator = torch.Generator(next(iter(parameters.values())).device).manual_seed(seed)
        for name, parameter in parameters.items():
            if is_adapter(name):
                continue
            if "norm" in name:
                parameter.fill_(1.0)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(std=WEIGHT_STD, generator=generator)
    return model
