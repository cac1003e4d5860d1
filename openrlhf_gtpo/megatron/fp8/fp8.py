"""FP8 in a model's decoder: its setup, a switch for passes in high precision, its state between passes, an emulation.

Transformer Engine's layers compute in FP8 by themselves, as configured. On any host :class:`EmulatedLinear` replaces
the product of the portable layers and computes Transformer Engine's products in torch.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor

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
from openrlhf_gtpo.megatron.fp8.weights import EmulatedWeight, in_high_precision, is_fp8, keep_exact

STATE = ".fp8."  # in the names of buffers that only FP8 checkpoints have
INPUT, WEIGHT, GRADIENT = range(3)  # the matrices of a product, and the rows of a delayed scaling's state


class Fp8:
    """FP8 in the decoder of ``stage``, whose weights are loaded.

    Args:
        for_training: emulated FP8 primary weights keep their exact values for the optimizer, which is made next.

    Attributes:
        calibrated: False before delayed scales have seen a pass, so that the first pass would be useless.
    """

    def __init__(self, options: Fp8Options, stage: Any, *, for_training: bool = True) -> None:
        self.options = options
        self.calibrated = options.recipe != "delayed"
        self._stage = stage
        self._config: Any = stage.config
        self._linears: list[EmulatedLinear] = []
        self._seen = False  # True if the scales lack the amax of a training micro-batch
        if options.emulated:
            self._emulate(for_training)

    def _emulate(self, for_training: bool) -> None:
        """Put the emulation into each of the stage's linear layers that ``options`` covers."""
        config = self._config
        layers = [
            layer
            for layer in self._stage.decoder.layers
            if self.options.covers(layer.layer_number - 1, config.num_layers)
        ]
        for module in [module for layer in layers for module in layer.modules()]:
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            if self.options.primary_weights:
                exact = module.weight
                module.weight = torch.nn.Parameter(EmulatedWeight.empty_like(exact, self.options.recipe))
                vars(module.weight).update(vars(exact))
                with torch.no_grad():
                    module.weight.copy_(exact.detach())
                if for_training:
                    keep_exact(module.weight, exact)
            # As a submodule, so that checkpoints have its buffers.
            module.fp8 = EmulatedLinear(
                self.options,
                module._forward_impl,
                history=config.fp8_amax_history_len,
                margin=config.fp8_margin,
                use_max=config.fp8_amax_compute_algo == "max",
            ).to(module.weight.device)
            module._forward_impl = module.fp8.forward
            self._linears.append(module.fp8)
        if self._linears and self.options.recipe == "delayed":
            self._stage.register_forward_pre_hook(self._before_micro_batch)

    @contextlib.contextmanager
    def high_precision(self) -> Iterator[None]:
        """Compute without FP8 within this context."""
        mode, self._config.fp8 = self._config.fp8, None
        calibrated, self.calibrated = self.calibrated, True  # scales learn nothing from a pass without FP8
        for linear in self._linears:
            linear.enabled = False
        try:
            yield
        finally:
            self._config.fp8, self.calibrated = mode, calibrated
            for linear in self._linears:
                linear.enabled = True

    @contextlib.contextmanager
    def weights_kept(self) -> Iterator[None]:
        """Quantize each weight once in this context, in which none may change; Megatron tells Transformer Engine
        itself."""
        for linear in self._linears:
            linear.keep_weight(True)
        try:
            yield
        finally:
            for linear in self._linears:
                linear.keep_weight(False)

    def drop_caches(self) -> None:
        """Free the quantized weights in Transformer Engine's modules; a step's first micro-batch remakes them."""
        for module in self._stage.modules():
            getattr(module, "_fp8_workspaces", {}).clear()

    def forget_recomputation(self) -> None:
        """Drop the delayed scales kept for a recomputation, after a forward pass without one: otherwise the next
        recomputation would take the oldest kept ones, also in Transformer Engine (2.11, pytorch/quantization.py,
        get_old_fp8_meta_tensors_for_recompute)."""
        for linear in self._linears:
            linear.kept_scales.clear()
        if self.options.emulated:
            return
        from megatron.core.fp8_utils import FP8GlobalStateManager
        from transformer_engine.pytorch.distributed import activation_recompute_forward

        activation_recompute_forward._is_first_fp8_module.clear()
        for scales in FP8GlobalStateManager.fp8_tensors_recompute_buffer:
            scales.clear()

    @torch.no_grad()
    def update_scales(self, *, after_step: bool) -> None:
        """Update delayed scales from the amax of training micro-batches. Transformer Engine does this by itself.

        Args:
            after_step: collective over all replicas, which then have the same scales. Between a step's micro-batches
                the call is collective over one replica, because replicas may have different numbers of them.
        """
        if not self._seen:
            return
        self._seen = False
        histories = torch.stack([linear.amax_history for linear in self._linears])
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True, tp_only_amax_red=not after_step)
        if group.size() > 1:
            torch.distributed.all_reduce(histories, op=torch.distributed.ReduceOp.MAX, group=group)
        for linear, history in zip(self._linears, histories, strict=True):
            linear.amax_history.copy_(history)
            linear.update_scales()

    def _before_micro_batch(self, *unused: Any) -> None:
        self.update_scales(after_step=False)
        self._seen = self._stage.training and torch.is_grad_enabled()


class EmulatedLinear(torch.nn.Module):
    """Emulates the FP8 product of one of Megatron's column- or row-parallel layers, with Megatron's collectives.

    Forward Y = Q(X) Q(W)ᵀ, backward dX = Q(dY) Q(W) and dW = Q(dY)ᵀ Q(X). Blocks lie along the dimension that products
    sum over, so with ``blockwise``, X and dY are quantized twice, along rows and along columns. Products are
    torch's, in the layer's own dtype: in float32 they equal Transformer Engine's except for the order of sums; in
    bfloat16, a number times its inverse scale is first rounded to bfloat16 (relative 2^-9, where FP8 rounds to 2^-4),
    which a tensor core does not do.

    Buffers of the delayed recipe, as in Transformer Engine, saved with the model:
        scale: (3,) float32, for input, weight and gradient; 1 before anything was seen.
        amax_history: (3, L) float32; the first column is being filled.

    Args:
        exact: the product without FP8, called as :meth:`forward`.
        history: L.
        margin: number of powers of two that a delayed scale stays below the largest.
        use_max: delayed scales come from the whole history; otherwise from its newest entry.
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
        self.kept_scales: deque[Tensor] = deque()  # scales of inputs that will be recomputed under later scales
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
        """Replace ``_forward_impl`` of Megatron's layers: map (s, b, I) and (O/TP, I) to (s, b, O/TP)."""
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
        scale = None
        if self.recipe == "delayed" and self.training and is_checkpointing():
            if torch.is_grad_enabled():  # the recomputation
                scale = self.kept_scales.popleft()
            else:
                self.kept_scales.append(self.scale[INPUT].clone())
        product = _Product.apply(input.flatten(0, -2), weight, self, trains, scale).view(*input.shape[:-1], -1)
        return product if bias is None else product + bias

    def quantized_weight(self, weight: Tensor) -> Quantized:
        """Return the (O, I) weight in FP8, cached while no weight changes; an FP8 primary weight as it is."""
        if isinstance(weight, EmulatedWeight):
            return weight.quantized
        if self._weight is None or not self.keeps_weight:
            self._weight = self.by_rows(WEIGHT, weight)
        return self._weight

    def keep_weight(self, keeps: bool) -> None:
        """From now on, quantize the weight once if ``keeps``, else for each product; drop the cached one."""
        self.keeps_weight, self._weight = keeps, None

    def by_rows(self, which: int, matrix: Tensor, scale: Tensor | None = None) -> Quantized:
        """Quantize (M, N) for a product that sums over its columns: blocks lie along its rows.

        Args:
            scale: the delayed scale that this matrix had before.
        """
        dtype = self.dtypes[which]
        if self.recipe == "blockwise":
            return quantize_blocks(matrix, dtype, SQUARES if which == WEIGHT else ROWS)
        amax = amax_of(matrix)
        if self.recipe == "tensorwise":
            return quantize(matrix, dtype, scale_of(amax, dtype))
        if scale is None:
            torch.maximum(self.amax_history[which, 0], amax, out=self.amax_history[which, 0])
            scale = self.scale[which].clone()
        return quantize(matrix, dtype, scale)

    def by_columns(self, which: int, matrix: Tensor, by_rows: Quantized) -> Quantized:
        """Quantize (M, N) for a product that sums over its rows; reuse ``by_rows`` if one scale is for the whole."""
        return quantize_blocks(matrix, self.dtypes[which], COLUMNS) if self.recipe == "blockwise" else by_rows

    @torch.no_grad()
    def update_scales(self) -> None:
        """Delayed recipe: take scales from the history, then shift it. An amax of 0 or infinity changes no scale."""
        for which, dtype in enumerate(self.dtypes):
            history = self.amax_history[which]
            amax = history.amax() if self.use_max else history[0].clone()
            if amax > 0 and amax.isfinite():
                self.scale[which] = scale_of(amax, dtype) / 2**self.margin
            history.copy_(history.roll(-1))
            history[0] = 0.0


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, matrix: Tensor, weight: Tensor, linear: EmulatedLinear, trains: bool, scale: Tensor | None
    ) -> Tensor:
        by_rows = linear.by_rows(INPUT, matrix, scale)
        # Only the weight's gradient reads it; an old-policy forward pass or a frozen weight has none.
        by_columns = linear.by_columns(INPUT, matrix, by_rows) if trains else by_rows
        quantized_weight = linear.quantized_weight(weight)
        ctx.save_for_backward(by_columns.data, by_columns.scale, quantized_weight.data, quantized_weight.scale)
        ctx.blocks = by_columns.block, quantized_weight.block
        ctx.linear = linear
        return by_rows.dequantize(matrix.dtype) @ quantized_weight.dequantize(matrix.dtype).T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        data, scale, weight_data, weight_scale = ctx.saved_tensors
        by_rows = ctx.linear.by_rows(GRADIENT, gradient)
        dtype = gradient.dtype
        d_matrix = d_weight = None
        if ctx.needs_input_grad[0]:
            weight = Quantized(weight_data, weight_scale, ctx.blocks[1])
            d_matrix = by_rows.dequantize(dtype) @ weight.dequantize(dtype)
        if ctx.needs_input_grad[1]:
            matrix = Quantized(data, scale, ctx.blocks[0])
            by_columns = ctx.linear.by_columns(GRADIENT, gradient, by_rows)
            d_weight = by_columns.dequantize(dtype).T @ matrix.dequantize(dtype)
        return d_matrix, d_weight, None, None, None
