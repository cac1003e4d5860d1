"""FP8 options, and which models and hosts can run them. Pure arithmetic, used before anything starts.

Alignment and support: Transformer Engine 2.11 (``assert_dim_for_fp8_exec``, ``Float8BlockQuantizer.is_quantizable``,
``check_recipe_support``).
"""

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from openrlhf_gtpo.megatron.families import FAMILIES
from openrlhf_gtpo.megatron.parallel.layout import Layout, LayoutError, legal_tensor_parallel_sizes
from openrlhf_gtpo.model_shape import ModelShape

MODES = ("hybrid", "e4m3", "emulated")
RECIPES = ("delayed", "tensorwise", "blockwise")
BLOCK = 128  # side of a scaled block
TRANSFORMER_ENGINE = ">=2.9,<2.12"  # what megatron-core 0.16.1 asks for, and 0.19.2 takes; others are not refused
CAPABILITY = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0)}
_CUDA = {"delayed": (12, 1), "tensorwise": (12, 1), "blockwise": (12, 9)}
# From this capability on, blocks are multiplied as MXFP8, and scales other than powers of two are an error in the
# middle of a step (https://github.com/NVIDIA/TransformerEngine/pull/2157).
_BLOCKS_AS_MXFP8 = (10, 0)
FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"  # set to 1 by openrlhf_gtpo/__init__.py


@dataclass(frozen=True)
class Fp8Options:
    """FP8 products in the decoder's linear layers; embedding, LM head, norms and attention stay as they are.

    Fields:
        mode: ``hybrid`` (E4M3 forward, E5M2 gradients) or ``e4m3`` by Transformer Engine, or ``emulated``: the same
            rounding in torch, on any host; it is hybrid, but E4M3 throughout for ``blockwise``.
        recipe: where scales come from: earlier steps (``delayed``), the tensor itself (``tensorwise``), or its blocks
            (``blockwise``: 1 × 128 of activations and gradients, 128 × 128 of weights).
        layers_at_start_in_bf16, layers_at_end_in_bf16: decoder layers left out.
        primary_weights: devices hold these layers' weights only in FP8, the optimizer's float32 shards the originals.
    """

    mode: str
    recipe: str = "blockwise"
    layers_at_start_in_bf16: int = 0
    layers_at_end_in_bf16: int = 0
    primary_weights: bool = False

    @property
    def emulated(self) -> bool:
        """True if FP8 is emulated, without Transformer Engine."""
        return self.mode == "emulated"

    @property
    def gradients_in_e5m2(self) -> bool:
        """True if gradients are in E5M2; otherwise they are in E4M3, like everything else."""
        return self.mode == "hybrid" or (self.emulated and self.recipe != "blockwise")

    @property
    def alignment(self) -> int:
        """The number of tokens on a rank is a multiple of this."""
        return BLOCK if self.recipe == "blockwise" else 16

    def fields(self) -> dict[str, Any]:
        """TransformerConfig fields for Transformer Engine's modes; none for the emulation, unknown to Megatron."""
        if self.emulated:
            return {}
        return {
            "fp8": self.mode,
            "fp8_recipe": self.recipe,
            "fp8_param": self.primary_weights,
            # Replicas differ in their number of micro-batches, so none may wait for another's amax.
            "tp_only_amax_red": True,
            "first_last_layers_bf16": self.layers_at_start_in_bf16 + self.layers_at_end_in_bf16 > 0,
            "num_layers_at_start_in_bf16": self.layers_at_start_in_bf16,
            "num_layers_at_end_in_bf16": self.layers_at_end_in_bf16,
        }

    def covers(self, layer: int, num_layers: int) -> bool:
        """True if the decoder layer ``layer`` (from 0, over all stages) computes in FP8."""
        return self.layers_at_start_in_bf16 <= layer < num_layers - self.layers_at_end_in_bf16


def check_fp8(options: Fp8Options, hf_config: Any, layout: Layout, *, cuda: bool) -> None:
    """Refuse options that cannot run, given the model, the layout and the host.

    Raises:
        LayoutError: the first thing that cannot work, and what would.
    """
    if not options.emulated and not cuda:
        raise LayoutError(
            f"$fp8 {options.mode} needs a CUDA device of compute capability 8.9 or above, and this host has "
            "none; $fp8 emulated gives FP8's numbers (not its speed) on any host."
        )
    if FAMILIES[hf_config.model_type].has_experts:
        raise LayoutError(f"$fp8 {options.mode} does not cover the experts of {hf_config.model_type}; leave it out.")
    scales = os.environ.get(FP32_SCALES)
    if options.recipe == "blockwise" and scales != "1":
        raise LayoutError(
            f"$fp8_recipe blockwise has float32 scales, and {FP32_SCALES}={scales} in the environment asks for powers "
            "of two; unset it, or use tensorwise."
        )
    if options.primary_weights and options.recipe == "delayed":
        raise LayoutError(
            "$fp8_param does not work with $fp8_recipe delayed, whose scales know nothing of the weights when "
            "they are read; use tensorwise or blockwise."
        )
    _check_bf16_layers(options, hf_config.num_hidden_layers, layout)
    if not options.emulated:
        _check_widths(options, hf_config, layout)


def check_transformer_engine(recipe: str) -> None:
    """Refuse FP8 without Transformer Engine, or with one whose ``recipe`` computes something else in this process.

    Raises:
        LayoutError: it is not installed, or it scales tensors differently from the emulation.
    """
    try:
        importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError as error:
        raise LayoutError(
            "$fp8 needs Transformer Engine, which is not installed; setup_env.sh --cuda --with-kernels compiles it, "
            "and $fp8 emulated needs none."
        ) from error
    if recipe == "blockwise":
        # The parts of Megatron's recipe (megatron-core 0.16.1, 0.19.2: fp8_utils.py, get_fp8_recipe).
        from transformer_engine.common.recipe import Float8BlockScaling as scaling

        tensors = (scaling.fp8_quant_fwd_inp, scaling.fp8_quant_fwd_weight, scaling.fp8_quant_bwd_grad)
        if any(tensor.power_2_scale for tensor in tensors):
            raise LayoutError(
                "$fp8_recipe blockwise has float32 scales, and in this process Transformer Engine rounds them to "
                f"powers of two: it was imported before {FP32_SCALES} was 1; set that before Python and Ray start."
            )


def check_fp8_host(options: Fp8Options, capability: tuple[int, int], cuda: tuple[int, int]) -> None:
    """Refuse a recipe of Transformer Engine that this device or build does not support.

    Args:
        capability: compute capability of the device, such as (9, 0).
        cuda: the CUDA version that torch was built with.

    Raises:
        LayoutError: what is missing, and which recipes run here.
    """
    requested = f"$fp8 {options.mode} $fp8_recipe {options.recipe}"
    too_new = {"blockwise"} if capability >= _BLOCKS_AS_MXFP8 else set()
    possible = [recipe for recipe in RECIPES if capability >= CAPABILITY[recipe] and cuda >= _CUDA[recipe]]
    possible = [recipe for recipe in possible if recipe not in too_new]
    if options.recipe not in possible:
        others = f"the recipes that run here are: {', '.join(possible)}" if possible else "no recipe runs here"
        if options.recipe in too_new:
            raise LayoutError(
                f"{requested} has float32 scales, and on this device (compute capability {_version(capability)}) "
                f"Transformer Engine multiplies blocks as MXFP8, with powers of two only; {others}."
            )
        raise LayoutError(
            f"{requested} needs compute capability {_version(CAPABILITY[options.recipe])} and torch built with CUDA "
            f"{_version(_CUDA[options.recipe])} or above, and this device has {_version(capability)} and this torch "
            f"{_version(cuda)}; {others}."
        )


def _check_bf16_layers(options: Fp8Options, layers: int, layout: Layout) -> None:
    start, end = options.layers_at_start_in_bf16, options.layers_at_end_in_bf16
    most = layers // layout.pipeline_model_parallel_size
    for name, number in (("start", start), ("end", end)):
        if not 0 <= number <= most:
            raise LayoutError(
                f"$num_layers_at_{name}_in_bf16 {number} is not between 0 and the {most} layers of a pipeline stage."
            )
    if start + end >= layers:
        raise LayoutError(
            f"$num_layers_at_start_in_bf16 {start} and $num_layers_at_end_in_bf16 {end} leave none "
            f"of this model's {layers} layers in FP8; leave $fp8 out."
        )
    if options.recipe == "delayed" and start + end > 0:
        raise LayoutError(
            "$fp8_recipe delayed cannot leave layers in BF16 (Transformer Engine reduces its scales over all "
            "of them); use tensorwise or blockwise."
        )


def _check_widths(options: Fp8Options, hf_config: Any, layout: Layout) -> None:
    """Refuse a sharded matrix with a side that is not a multiple of the alignment."""
    shape = ModelShape.of(hf_config)

    def unfit(size: int) -> list[tuple[str, int]]:
        query, qkv = shape.query_width, shape.query_width + 2 * shape.key_value_width
        widths = [
            ("hidden_size", shape.hidden_size),
            ("the width of all heads on a rank", query // size),
            ("the width of query, key and value heads on a rank", qkv // size),
            ("the MLP's columns on a rank", shape.intermediate_size // size),
        ]
        return [(side, number) for side, number in widths if number % options.alignment]

    wrong = unfit(layout.tensor_model_parallel_size)
    if not wrong:
        return
    side, number = wrong[0]
    legal = [size for size in legal_tensor_parallel_sizes(hf_config) if not unfit(size)]
    remedy = (
        f"$tensor_model_parallel_size can be {', '.join(map(str, legal))}"
        if legal
        else "no tensor-parallel size gives that; use another recipe or $fp8 emulated"
    )
    raise LayoutError(
        f"$fp8_recipe {options.recipe} multiplies in multiples of {options.alignment}, and {side} is {number} at "
        f"$tensor_model_parallel_size {layout.tensor_model_parallel_size}; {remedy}."
    )


def _version(numbers: tuple[int, int]) -> str:
    return ".".join(map(str, numbers))
