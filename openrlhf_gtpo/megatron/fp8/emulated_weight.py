"""An FP8 primary weight on any host: what Transformer Engine's tensors are to Megatron, in torch.

Megatron asks a few functions of ``fp8_utils`` whether a parameter is in FP8, where it lies, and to quantise the optimizer's
shards into it; :func:`emulate` has them know :class:`EmulatedWeight` too.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core import fp8_utils
from megatron.core.optimizer import distrib_optimizer
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.quantize import (
    E4M3,
    SQUARES,
    Quantized,
    amax_of,
    amax_of_blocks,
    grid,
    quantize,
    quantize_blocks,
    scale_of,
    scale_of_blocks,
)
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision


class EmulatedWeight(torch.Tensor):
    """(O, I) of a high precision to all who ask, and E4M3 in memory.

    Args:
        data: (O, I) uint8, the numbers' codes.
        scale: () or of blocks, float32; see :class:`Quantized`.
        dtype: what it says it is, and comes back in.
    """

    # As in Transformer Engine: what a tensor does is decided below, where autograd has done its part.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, data: Tensor, scale: Tensor, dtype: torch.dtype) -> "EmulatedWeight":
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        self.codes = data
        self.scale = scale

    @property
    def quantized(self) -> Quantized:
        return Quantized(self.codes.view(E4M3), self.scale, SQUARES if self.scale.dim() else None)

    def dequantize(self) -> Tensor:  # type: ignore[override]
        return self.quantized.dequantize(self.dtype)

    def amax(self, values: Tensor) -> Tensor:  # type: ignore[override]
        """What a scale follows from, of each block or of all."""
        return amax_of_blocks(values, SQUARES) if self.scale.dim() else amax_of(values)

    def quantize_(self, values: Tensor, amax: Tensor | None = None) -> None:
        """Take the numbers of ``values`` (O, I), scaled by their own ``amax`` or a larger one."""
        amax = self.amax(values) if amax is None else amax
        if self.scale.dim():
            of = quantize_blocks(values, E4M3, SQUARES, scale_of_blocks(amax, E4M3, values.dtype))
        else:
            of = quantize(values, E4M3, scale_of(amax, E4M3))
        self.codes.copy_(of.data.view(torch.uint8))
        self.scale.copy_(of.scale)

    def get_metadata(self) -> dict[str, Tensor]:
        """The tensors that it is made of, as Transformer Engine's say it."""
        return {"codes": self.codes, "scale": self.scale}

    def expand_as(self, other: Tensor) -> Tensor:
        """Megatron asks a parameter to expand as itself, for the node that its gradient arrives at."""
        assert other is self
        return _Same.apply(self)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.detach.default:
            (weight,) = args
            return cls(weight.codes, weight.scale, weight.dtype)
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].quantize_(_plain(args[1]).to(args[0].dtype))
            return args[0]
        assert func._schema.name == "aten::copy_" or not func._schema.is_mutable, f"{func} cannot write into FP8"
        args, kwargs = torch.utils._pytree.tree_map(_plain, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def emulate(linears: Iterable[torch.nn.Module], recipe: str) -> None:
    """Make the weights of these layers, whose values do not matter yet, :class:`EmulatedWeight`."""
    _teach_megatron()
    for linear in linears:
        old: Any = linear.weight
        shape = grid(old.shape, SQUARES) if recipe == "blockwise" else []
        codes = torch.zeros(old.shape, dtype=torch.uint8, device=old.device)
        new = torch.nn.Parameter(EmulatedWeight(codes, torch.ones(shape, device=old.device), old.dtype))
        vars(new).update(vars(old))
        linear.weight = new


def _plain(value: Any) -> Any:
    return value.dequantize() if isinstance(value, EmulatedWeight) else value


def _teach_megatron() -> None:
    """Let Megatron take :class:`EmulatedWeight` for one of Transformer Engine's tensors, here and in all it hands them to.
    Safe to call twice."""
    known = fp8_utils.FP8_TENSOR_CLASS if fp8_utils.HAVE_TE_FP8_TENSOR_CLASS else ()
    known = known if isinstance(known, tuple) else (known,)
    if EmulatedWeight in known:
        return
    fp8_utils.FP8_TENSOR_CLASS = (*known, EmulatedWeight)
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
            quantize_shards_of(weights, masters, offsets, group)
        else:
            quantize_shards(weights, masters, offsets, group, *others)

    fp8_utils._modify_underlying_storage_impl = place_any
    fp8_utils._quantize_param_shard_impl = quantize_any
    # Megatron's asks for Transformer Engine's version, which a host without it has not.
    for module in (fp8_utils, distrib_optimizer):
        module.dequantize_fp8_tensor = in_high_precision
    gathered = fp8_utils.te_post_all_gather_processing
    if gathered is not None:
        fp8_utils.te_post_all_gather_processing = lambda weights: gathered(
            [weight for weight in weights if not isinstance(weight, EmulatedWeight)]
        )


def _spread(weight: EmulatedWeight, master: Tensor | None, offset: int | None) -> Tensor:
    """(O, I) with this rank's part, in the type that the weight says it is, and zeros elsewhere."""
    whole = torch.zeros(weight.shape, dtype=weight.dtype, device=weight.codes.device)
    if master is not None:
        whole.view(-1)[offset : offset + master.numel()].copy_(master)  # type: ignore[operator]
    return whole


@torch.no_grad()
def quantize_shards_of(
    weights: Sequence[EmulatedWeight],
    masters: Sequence[Tensor | None],
    offsets: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
) -> None:
    """This rank's part of every weight from its float32 values, with scales of the whole weight (collective over ``group``).

    Args:
        masters: (n,) float32 each, the flat weight from ``offsets`` on; None where other ranks have all of it.
    """
    amaxes = [weight.amax(_spread(weight, *part)) for weight, *part in zip(weights, masters, offsets, strict=True)]
    flat = torch.cat([amax.flatten() for amax in amaxes])
    torch.distributed.all_reduce(flat, op=torch.distributed.ReduceOp.MAX, group=group)
    parts = flat.split([amax.numel() for amax in amaxes])
    for weight, master, offset, amax, part in zip(weights, masters, offsets, amaxes, parts, strict=True):
        weight.quantize_(_spread(weight, master, offset), part.view(amax.shape))
