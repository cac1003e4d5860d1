"""FP8 primary weights: decoder matrices that a device holds only in FP8, beside the optimizer's float32 shards.

Transformer Engine has tensors for this, which Megatron's gradient buffers and distributed optimizer know how to place,
quantize and gather (``fp8_param``); :class:`EmulatedWeight` is such a tensor for any host, in torch.

The optimizer's weights must be the checkpoint's, not what FP8 left of them: :func:`keep_exact` keeps the originals.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from types import MethodType
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.quantize import E4M3, SQUARES, Quantized, amax_of, grid, quantize, scale_of


def is_fp8(parameter: Tensor) -> bool:
    """True if the parameter's only copy on the device is in FP8."""
    return fp8_utils.is_float8tensor(parameter)


def in_high_precision(parameter: Tensor) -> Tensor:
    """The parameter's values, without gradient: its own memory, or a converted copy if it is in FP8."""
    return parameter.dequantize() if is_fp8(parameter) else parameter.detach()


def memory_of(parameter: Tensor) -> list[Tensor]:
    """The tensors that store a parameter."""
    if not is_fp8(parameter):
        return [parameter.data]
    return [part for part in parameter.get_metadata().values() if isinstance(part, Tensor)]  # type: ignore[attr-defined]


@contextlib.contextmanager
def loading(stage: torch.nn.Module, *, for_training: bool = True) -> Iterator[None]:
    """Within this context, FP8 parameters of ``stage`` are plain ones to fill; on exit the FP8 ones take their values.

    Args:
        for_training: keep the exact values for the optimizer that is made next.
    """
    places = [
        (module, name, parameter)
        for module in stage.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_fp8(parameter)
    ]
    for module, name, parameter in places:
        plain = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        module._parameters[name] = torch.nn.Parameter(plain)
    try:
        yield
    finally:
        for module, name, parameter in places:
            exact = module._parameters[name]
            module._parameters[name] = parameter
            with torch.no_grad():
                parameter.copy_(exact.detach())
            if for_training:
                keep_exact(parameter, exact)


def keep_exact(parameter: Any, exact: Tensor) -> None:
    """Keep ``exact`` in host memory for the optimizer, under the method names that Megatron calls on Transformer
    Engine tensors."""
    parameter._high_precision_init_val = exact.detach().cpu()
    parameter.get_high_precision_init_val = MethodType(_get, parameter)
    parameter.clear_high_precision_init_val = MethodType(_clear, parameter)


def _get(parameter: Any) -> Tensor:
    return parameter._high_precision_init_val


def _clear(parameter: Any) -> None:
    for name in ("_high_precision_init_val", "get_high_precision_init_val", "clear_high_precision_init_val"):
        vars(parameter).pop(name, None)


class EmulatedWeight(torch.Tensor):
    """An (O, I) matrix that is E4M3 in memory and looks like high precision to everyone else.

    Args:
        codes: (O, I) uint8, the numbers' bits.
        scale: float32, () or one per block; see :class:`Quantized`.
        dtype: the high precision that it claims to be in and is converted back to.
    """

    # As in Transformer Engine: __torch_dispatch__ below handles operations, after autograd has done its part.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> "EmulatedWeight":
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes = codes
        self.scale = scale
        self.block = SQUARES if scale.dim() else None

    @classmethod
    def empty_like(cls, weight: Tensor, recipe: str) -> "EmulatedWeight":
        """An empty tensor of the shape of ``weight``, without its values."""
        _teach_megatron()
        shape = grid(weight.shape, SQUARES) if recipe == "blockwise" else []
        codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
        return cls(codes, torch.ones(shape, device=weight.device), weight.dtype)

    @property
    def quantized(self) -> Quantized:
        # ``data``: Megatron may still be gathering other weights into the buffer of these codes when backward passes
        # read them, and autograd counts changes of the whole buffer, not of its parts.
        return Quantized(self.codes.data.view(E4M3), self.scale, self.block)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.quantized.dequantize(self.dtype)

    def quantize_(self, values: Tensor, amax: Tensor | None = None) -> None:
        """Store ``values`` (O, I) in FP8, scaled by their own ``amax`` or a larger one."""
        amax = amax_of(values, self.block) if amax is None else amax
        scale = scale_of(amax, E4M3, values.dtype if self.block else torch.float32)
        quantized = quantize(values, E4M3, scale, self.block)
        self.codes.copy_(quantized.data.view(torch.uint8))
        self.scale.copy_(quantized.scale)

    def get_metadata(self) -> dict[str, Tensor]:
        """The tensors that this one consists of, under the name of Transformer Engine's method."""
        return {"codes": self.codes, "scale": self.scale}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        # Megatron expands a parameter as itself, to find the autograd node at which its gradient arrives.
        if func in (torch.ops.aten.detach.default, torch.ops.aten.expand.default):
            weight, *shape = args
            assert shape in ([], [list(weight.shape)])
            return cls(weight.codes, weight.scale, weight.dtype)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(_plain(args[1]).to(args[0].dtype))
            return args[0]
        assert func._schema.name == "aten::copy_" or not func._schema.is_mutable, f"{func} cannot write into FP8"
        args, kwargs = torch.utils._pytree.tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, EmulatedWeight) else value


@cache
def _teach_megatron() -> None:
    """Make Megatron treat :class:`EmulatedWeight` as one of Transformer Engine's tensors.

    Megatron 0.16.1 and 0.19.2 use the functions and classes replaced here (``core/fp8_utils.py``) to tell if a
    parameter is in FP8, to place it, and to quantize the optimizer's shards into it. Can go once a tensor can be
    registered.
    """
    te_classes = (fp8_utils.FP8_TENSOR_CLASS,) if fp8_utils.HAVE_TE_FP8_TENSOR_CLASS else ()
    fp8_utils.FP8_TENSOR_CLASS = (*te_classes, EmulatedWeight)
    fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = True
    place, quantize_shards = fp8_utils._modify_underlying_storage_impl, fp8_utils._quantize_param_shard_impl

    def place_any(weight: Any, memory: Tensor) -> None:
        if isinstance(weight, EmulatedWeight):
            memory.copy_(weight.codes)
            weight.codes = memory
        else:
            place(weight, memory)

    def quantize_any(weights: Sequence[Any], masters: Any, offsets: Any, group: Any, *others: Any) -> None:
        if weights and isinstance(weights[0], EmulatedWeight):
            _quantize_shards(weights, masters, offsets, group)
        else:
            quantize_shards(weights, masters, offsets, group, *others)

    fp8_utils._modify_underlying_storage_impl = place_any
    fp8_utils._quantize_param_shard_impl = quantize_any
    # Megatron's function asks for Transformer Engine's version even on a host without it. Can go once it does not.
    for module in (fp8_utils, distrib_optimizer):
        module.dequantize_fp8_tensor = in_high_precision
    gathered = fp8_utils.te_post_all_gather_processing
    if gathered is not None:
        fp8_utils.te_post_all_gather_processing = lambda weights: gathered(
            [weight for weight in weights if not isinstance(weight, EmulatedWeight)]
        )


@torch.no_grad()
def _quantize_shards(
    weights: Sequence[EmulatedWeight],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
) -> None:
    """Quantize this rank's part of every weight from float32, with the whole's scales (collective over ``group``).

    Args:
        masters: (n,) float32 each, the flat weight from ``offsets`` on; None if other ranks have all of it.
    """

    def spread(weight: EmulatedWeight, master: Tensor | None, offset: int | None) -> Tensor:
        """(O, I) with this rank's part, in the dtype that the weight claims to be in, and zeros elsewhere."""
        full = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.codes.device)
        if master is not None:
            full.view(-1)[offset : offset + master.numel()].copy_(master)  # type: ignore[operator]
        return full

    parts = list(zip(weights, masters, offsets, strict=True))
    amaxes = [amax_of(spread(*part), part[0].block) for part in parts]
    flat = torch.cat([amax.flatten() for amax in amaxes])
    torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
    reduced = flat.split([amax.numel() for amax in amaxes])
    for part, amax, agreed in zip(parts, amaxes, reduced, strict=True):
        part[0].quantize_(spread(*part), agreed.view(amax.shape))
