"""Synthetic inputs of benchmarks: models with random weights, precisions to measure, and response lengths."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError, check_architecture
from openrlhf_gtpo.model_shape import read_config

BF16 = "bf16"
# Standard deviation of log-lengths: the longest of about a hundred responses is about ten times the median, as in runs
# of reasoning models.
_TAIL = 0.9


def read_shape(name: str, layers: int | None = None) -> Any:
    """Read Transformers' configuration of the model ``name``: a preset, a ``config.json``, or a folder with one.

    Args:
        layers: number of decoder layers to set; None keeps the model's.

    Raises:
        UsageError: no such preset or file, or an architecture that the Megatron actor or
            :func:`openrlhf_gtpo.model_shape.decoder_flops` does not support.
    """
    from transformers import AutoConfig

    fields = read_config(name)
    if layers is not None:
        fields["num_hidden_layers"] = layers
        fields.pop("layer_types", None)  # one entry per layer; Transformers fills it in
    try:
        config = AutoConfig.for_model(**fields)
        check_architecture(config)
    except (LayoutError, ValueError, TypeError) as error:
        raise UsageError(f"{name}: {error}") from error
    if getattr(config, "num_experts", None):
        raise UsageError(f"{name}: {config.model_type} is a mixture of experts; only dense models are measured here.")
    return config


def write_random_checkpoint(config: Any, folder: Path, seed: int) -> None:
    """Write bfloat16 weights of a model of ``config`` (two bytes a parameter) and a tokenizer of two tokens."""
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):  # drawing numbers on a CPU takes a minute
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    torch.cuda.empty_cache()
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<pad>"))
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)


def fp8_options(recipe: str, *, cuda: bool) -> Fp8Options:
    """Return FP8 options: Transformer Engine's on a CUDA host, otherwise the emulation's, with the same formats: E4M3
    throughout for ``blockwise``, which is its default, and hybrid for the others."""
    if not cuda:
        return Fp8Options("emulated", recipe)
    return Fp8Options("e4m3" if recipe == "blockwise" else "hybrid", recipe)


def precisions(
    recipes: Sequence[str], config: Any, *, cuda: bool, primary_weights: bool = False
) -> tuple[dict[str, Fp8Options | None], dict[str, str]]:
    """Return options by name, with :data:`BF16` first, and why recipes are absent that the model's widths rule out.

    Args:
        config: the model's Transformers configuration.
        primary_weights: adds each recipe with FP8 primary weights, if it supports them.
    """
    available: dict[str, Fp8Options | None] = {BF16: None}
    absent = {}
    requested = {recipe: fp8_options(recipe, cuda=cuda) for recipe in recipes}
    if primary_weights:
        requested |= {f"{name}, FP8 weights": replace(fp8, primary_weights=True) for name, fp8 in requested.items()}
    for name, fp8 in requested.items():
        try:
            check_fp8(fp8, config, Layout(), cuda=cuda)
            available[name] = fp8
        except LayoutError as error:
            absent[name] = str(error)
    return available, absent


def even_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """Draw (B,) response lengths, uniform from half of ``longest`` to all of it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(max(1, longest // 2), longest + 1, (rows,), generator=generator)


def long_tailed_lengths(rows: int, longest: int, seed: int) -> Tensor:
    """Draw (B,) response lengths, log-normal with median ``longest / 6``, truncated at ``longest`` like a token
    limit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = longest / 6 * (_TAIL * torch.randn(rows, generator=generator)).exp()
    return lengths.round().clamp(1, longest).long()
