"""The precisions that a benchmark compares: bfloat16 and each FP8 recipe, in the mode that this host has."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError

BF16 = "bf16"
PRIMARY = ", FP8 weights"  # after a recipe's name


def fp8_options(recipe: str, *, cuda: bool) -> Fp8Options:
    """Transformer Engine's on a CUDA host: E4M3 throughout for ``blockwise``, as is its own default, and hybrid for the
    others; elsewhere their emulation, which has the same formats."""
    if not cuda:
        return Fp8Options("emulated", recipe)
    return Fp8Options("e4m3" if recipe == "blockwise" else "hybrid", recipe)


def precisions(
    recipes: Sequence[str], config: Any, *, cuda: bool, primary_weights: bool = False
) -> tuple[dict[str, Fp8Options | None], dict[str, str]]:
    """Name to options, :data:`BF16` first, and why recipes that the model's widths rule out are absent.

    Args:
        config: the model's configuration, as Transformers has it.
        primary_weights: each recipe with FP8 primary weights too, where it can have them.
    """
    found: dict[str, Fp8Options | None] = {BF16: None}
    absent = {}
    wanted = {recipe: fp8_options(recipe, cuda=cuda) for recipe in recipes}
    if primary_weights:
        wanted |= {f"{name}{PRIMARY}": replace(options, primary_weights=True) for name, options in wanted.items()}
    for name, options in wanted.items():
        try:
            check_fp8(options, config, Layout(), cuda=cuda)
        except LayoutError as error:
            absent[name] = str(error)
        else:
            found[name] = options
    return found, absent
