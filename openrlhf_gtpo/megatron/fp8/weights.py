"""FP8 primary weights: matrices of the decoder that a device holds in FP8 alone, beside the optimizer's float32 shards.

Transformer Engine has tensors for it, which Megatron's gradient buffers and distributed optimizer know how to place,
quantise and gather (``fp8_param``); ``emulated_weight`` has one for any host.

The optimizer's weights must be the checkpoint's, not what FP8 left of them: :func:`loading` keeps those for it.
"""

import contextlib
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from megatron.core import fp8_utils
from torch import Tensor


def is_fp8(parameter: Tensor) -> bool:
    """Whether its only copy on the device is in FP8."""
    return fp8_utils.is_float8tensor(parameter)


def in_high_precision(parameter: Tensor) -> Tensor:
    """The parameter's values, without gradient: its own memory, or a copy of what is in FP8."""
    return parameter.dequantize() if is_fp8(parameter) else parameter.detach()


def memory_of(parameter: Tensor) -> list[Tensor]:
    """The tensors in which a parameter is kept."""
    if not is_fp8(parameter):
        return [parameter.data]
    return [part for part in parameter.get_metadata().values() if isinstance(part, Tensor)]  # type: ignore[attr-defined]


@contextlib.contextmanager
def loading(stage: torch.nn.Module, *, for_training: bool = True) -> Iterator[None]:
    """While it lasts, FP8 parameters of ``stage`` are plain ones to be filled; then they take the values.

    Args:
        for_training: keep the exact values, in host memory, for the optimizer that is made next (Megatron's
            ``get_high_precision_init_val``).
    """
    places = [
        (module, name, parameter)
        for module in stage.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_fp8(parameter)
    ]
    for module, name, parameter in places:
        plain = torch.nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        attributes = {key: value for key, value in vars(parameter).items() if key in _MEGATRON_S}
        vars(plain).update(attributes)
        module._parameters[name] = plain
    try:
        yield
    finally:
        for module, name, parameter in places:
            exact = module._parameters[name]
            module._parameters[name] = parameter
            with torch.no_grad():
                parameter.copy_(exact.detach())
            if for_training:
                parameter._high_precision_init_val = exact.detach().cpu()
                parameter.get_high_precision_init_val = MethodType(_get, parameter)
                parameter.clear_high_precision_init_val = MethodType(_clear, parameter)


# What Megatron's layers write onto a parameter, and mbridge reads to cut a tensor into shards.
_MEGATRON_S = ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel", "allreduce")


def _get(parameter: Any) -> Tensor:
    return parameter._high_precision_init_val


def _clear(parameter: Any) -> None:
    for name in ("_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val"):
        vars(parameter).pop(name, None)
