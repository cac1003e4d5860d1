"""FP8 of one model: set up, switched off for a pass in high precision, and its state between passes."""

import contextlib
import importlib.metadata
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from openrlhf_gtpo.megatron.fp8.linear import EmulatedLinear
from openrlhf_gtpo.megatron.fp8.options import Fp8Options, check_fp8_host

STATE = ".fp8."  # in the names of buffers that a checkpoint made without FP8 lacks


def check_host(options: Fp8Options) -> None:
    """Check this process's device for Transformer Engine's modes.

    Raises:
        LayoutError: the device or a build cannot do the recipe.
    """
    if options.emulated:
        return
    try:
        installed: tuple[int, int] | None = _two_numbers(importlib.metadata.version("transformer-engine"))
    except importlib.metadata.PackageNotFoundError:
        installed = None
    check_fp8_host(options, torch.cuda.get_device_capability(), _two_numbers(torch.version.cuda or "0.0"), installed)


class Fp8:
    """FP8 in the decoder of ``stage``, whose weights are loaded.

    Attributes:
        calibrated: False while delayed scales know nothing, so that a first pass would be of no use.
    """

    def __init__(self, options: Fp8Options, stage: torch.nn.Module) -> None:
        self.options = options
        self.calibrated = options.recipe != "delayed"
        self._stage = stage
        self._config: Any = stage.config
        self._linears = list(self._emulate()) if options.emulated else []
        self._seen = False  # a training micro-batch, whose amax the scales do not know yet
        if self._linears and options.recipe == "delayed":
            stage.register_forward_pre_hook(self._before_micro_batch)

    @contextlib.contextmanager
    def high_precision(self) -> Iterator[None]:
        """While it lasts, the model computes as it would without FP8."""
        mode, self._config.fp8 = self._config.fp8, None
        for linear in self._linears:
            linear.enabled = False
        try:
            yield
        finally:
            self._config.fp8 = mode
            for linear in self._linears:
                linear.enabled = True

    @contextlib.contextmanager
    def weights_kept(self) -> Iterator[None]:
        """While it lasts no weight changes, and each is quantised once. Transformer Engine's modules have it from Megatron."""
        for linear in self._linears:
            linear.keep_weight(True)
        try:
            yield
        finally:
            for linear in self._linears:
                linear.keep_weight(False)

    def drop_caches(self) -> None:
        """Free what Transformer Engine's modules keep of quantised weights; the next first micro-batch makes it again."""
        for module in self._stage.modules():
            getattr(module, "_fp8_workspaces", {}).clear()

    @torch.no_grad()
    def update_scales(self, *, after_step: bool) -> None:
        """Let delayed scales follow what training micro-batches have seen; Transformer Engine does so by itself.

        Args:
            after_step: collective over all replicas, which then have the same scales. Between the micro-batches of a
                step, of which they have different numbers, it is collective over one replica.
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

    def _emulate(self) -> Iterator[EmulatedLinear]:
        config = self._config
        for module in portable_linears(self._stage, self.options):
            emulated = EmulatedLinear(
                self.options,
                module._forward_impl,
                history=config.fp8_amax_history_len,
                margin=config.fp8_margin,
                use_max=config.fp8_amax_compute_algo == "max",
            ).to(module.weight.device)
            module.fp8 = emulated
            module._forward_impl = emulated.forward
            yield emulated

    def _before_micro_batch(self, *unused: Any) -> None:
        self.update_scales(after_step=False)
        self._seen = self._stage.training and torch.is_grad_enabled()


def portable_linears(stage: Any, options: Fp8Options) -> list[Any]:
    """The linear layers that ``options`` covers, where they are not Transformer Engine's."""
    return [
        module
        for layer in stage.decoder.layers
        if options.covers(layer.layer_number - 1, stage.config.num_layers)
        for module in layer.modules()
        if isinstance(module, ColumnParallelLinear | RowParallelLinear)
    ]


def _two_numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
