"""The product of a linear layer with its three matrices in FP8, emulated: what Transformer Engine multiplies.

Forward Y = Q(X) Q(W)ᵀ, backward dX = Q(dY) Q(W) and dW = Q(dY)ᵀ Q(X). Blocks lie along the dimension that a product sums
over, so with ``blockwise`` X and dY are quantised once along their rows and once along their columns. Products are torch's,
in the layer's own dtype: in float32 they are Transformer Engine's but for the order of sums; in bfloat16, a number times its
inverse scale is first rounded to it (relative 2^-9, where FP8 rounds to 2^-4), which a tensor core does not do.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.emulated_weight import EmulatedWeight
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.fp8.quantize import (
    COLUMNS,
    E4M3,
    E5M2,
    ROWS,
    SQUARES,
    Quantized,
    amax_of,
    quantize,
    quantize_blocks,
    scale_of,
)
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision, is_fp8

INPUT, WEIGHT, GRADIENT = range(3)  # the matrices of a product, and the rows of a delayed scaling's state


class EmulatedLinear(torch.nn.Module):
    """Stands in for the product of one of Megatron's column- or row-parallel layers; collectives are as in Megatron.

    Buffers of the delayed recipe, as Transformer Engine's, saved with the model:
        scale: (3,) float32, of input, weight and gradient; 1 before anything was seen.
        amax_history: (3, L) float32; the first column is being filled.

    Args:
        exact: the product without FP8, called as :meth:`forward`.
        history: L.
        margin: powers of two that a delayed scale stays below the largest.
        use_max: delayed scales come from the whole history, or from the newest entry.
    """

    def __init__(
        self, options: Fp8Options, exact: Callable, *, history: int = 1, margin: int = 0, use_max: bool = False
    ) -> None:
        super().__init__()
        self.recipe = options.recipe
        self.dtypes = (E4M3, E4M3, E5M2 if options.gradients_in_e5m2 else E4M3)
        self.margin = margin
        self.use_max = use_max
        self.enabled = True
        self.keeps_weight = False
        self._exact = exact
        self._weight: Quantized | None = None
        if self.recipe == "delayed":
            self.register_buffer("scale", torch.ones(3))
            self.register_buffer("amax_history", torch.zeros(3, history))

    def forward(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        sequence_parallel: bool,
        allreduce_dgrad: bool,
        tp_group: Any,
        **options: Any,
    ) -> Tensor:
        """What ``_forward_impl`` of Megatron's layers is called with: (s, b, I) and (O/TP, I) to (s, b, O/TP)."""
        if not self.enabled:
            if is_fp8(weight):
                assert not torch.is_grad_enabled(), "a gradient would not reach the FP8 weight"
                weight = in_high_precision(weight)
            options |= {"sequence_parallel": sequence_parallel, "allreduce_dgrad": allreduce_dgrad}
            return self._exact(input, weight, bias=bias, tp_group=tp_group, **options)
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        trains = torch.is_grad_enabled() and weight.requires_grad
        product = _Product.apply(input.flatten(0, -2), weight, self, trains).view(*input.shape[:-1], -1)
        return product if bias is None else product + bias

    def quantized_weight(self, weight: Tensor) -> Quantized:
        """(O, I), kept for the micro-batches between which no weight changes; an FP8 primary weight is there already."""
        if isinstance(weight, EmulatedWeight):
            return weight.quantized
        if self._weight is None or not self.keeps_weight:
            self._weight = self.by_rows(WEIGHT, weight)
        return self._weight

    def keep_weight(self, keeps: bool) -> None:
        """From now on the weight is quantised once, or (dropping what is held) for each product."""
        self.keeps_weight, self._weight = keeps, None

    def by_rows(self, which: int, matrix: Tensor) -> Quantized:
        """(M, N) for a product that sums over its columns: blocks lie along its rows."""
        dtype = self.dtypes[which]
        if self.recipe == "blockwise":
            return quantize_blocks(matrix, dtype, SQUARES if which == WEIGHT else ROWS)
        amax = amax_of(matrix)
        if self.recipe == "tensorwise":
            return quantize(matrix, dtype, scale_of(amax, dtype))
        torch.maximum(self.amax_history[which, 0], amax, out=self.amax_history[which, 0])
        return quantize(matrix, dtype, self.scale[which].clone())

    def by_columns(self, which: int, matrix: Tensor, by_rows: Quantized) -> Quantized:
        """(M, N) for a product that sums over its rows; what :meth:`by_rows` gave where one scale is for the whole."""
        return quantize_blocks(matrix, self.dtypes[which], COLUMNS) if self.recipe == "blockwise" else by_rows

    @torch.no_grad()
    def update_scales(self) -> None:
        """Delayed recipe: new scales from the history, which moves on by a place; an amax of 0 or infinity changes none."""
        for which, dtype in enumerate(self.dtypes):
            history = self.amax_history[which]
            amax = history.amax() if self.use_max else history[0].clone()
            if amax > 0 and amax.isfinite():
                self.scale[which] = scale_of(amax, dtype) / 2**self.margin
            history.copy_(history.roll(-1))
            history[0] = 0.0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, weight: Tensor, linear: EmulatedLinear, trains: bool) -> Tensor:
        by_rows = linear.by_rows(INPUT, matrix)
        # Only the weight's gradient reads it, which an old-policy forward or a frozen weight has not.
        by_columns = linear.by_columns(INPUT, matrix, by_rows) if trains else by_rows
        of_weight = linear.quantized_weight(weight)
        ctx.save_for_backward(by_columns.data, by_columns.scale, of_weight.data, of_weight.scale)
        ctx.blocks = by_columns.block, of_weight.block
        ctx.linear = linear
        return by_rows.dequantize(matrix.dtype) @ of_weight.dequantize(matrix.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        data, scale, weight_data, weight_scale = ctx.saved_tensors
        by_rows = ctx.linear.by_rows(GRADIENT, gradient)
        dtype = gradient.dtype
        of_matrix = of_weight = None
        if ctx.needs_input_grad[0]:
            weight = Quantized(weight_data, weight_scale, ctx.blocks[1])
            of_matrix = by_rows.dequantize(dtype) @ weight.dequantize(dtype)
        if ctx.needs_input_grad[1]:
            matrix = Quantized(data, scale, ctx.blocks[0])
            by_columns = ctx.linear.by_columns(GRADIENT, gradient, by_rows)
            of_weight = by_columns.dequantize(dtype).T @ matrix.dequantize(dtype)
        return of_matrix, of_weight, None, None
