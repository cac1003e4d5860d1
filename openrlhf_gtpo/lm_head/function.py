"""The LM head's public functions: log-probability and entropy of every token from hidden states, or from logits.

Owns the functions that other packages call, their checks, the choice of implementation, and their autograd. The
computation is in `projection`.
"""

import importlib.util
import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import tiles
from .portable import PortableTile
from .projection import Settings, TileWork, backward, forward
from .shard import VocabularyShard
from .softmax import LogitGradient

Implementation = Literal["auto", "portable", "triton"]


def linear_log_prob_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_bytes: int | None = None,
    with_entropy: bool = True,
    accumulate_into_main_grad: bool = False,
    implementation: Implementation = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Compute log p(label) and the entropy of p = softmax((hidden @ weight.T + bias) / temperature), token by token.

    Differentiable once in `hidden`, `weight` and `bias`, through the log-probability and, if it gets a gradient, the
    entropy. Only two numbers per token are kept for the backward pass, which recomputes the logits. Products are
    computed in the dtype of the inputs; everything else, including sums of gradients, is in float32.

    Args:
        hidden: (T, H), the same on every rank of `group`. Its gradient is summed over `group`.
        weight: (V_local, H) in the dtype of `hidden`: this rank's columns. The vocabulary may be split anywhere, in
            rank order.
        labels: (T,) integers, ids over the whole vocabulary, the same on every rank.
        temperature: divisor of the logits, bias included.
        bias: (V_local,), added in float32. -inf removes a column.
        vocab_size: number of real columns over all shards. Columns beyond it are padding: ignored, with gradient 0.
            None: all are real.
        group: the process group over which the vocabulary is sharded. None: not sharded.
        chunk_bytes: limit on temporary memory in the forward and in the backward pass, in bytes, except for a few
            numbers per token. None: 1 GiB on a device; 256 MiB on CPU, where tiles that stay in cache are faster.
        with_entropy: False returns None for the entropy.
        accumulate_into_main_grad: add the gradient of `weight` to `weight.main_grad` instead of returning it, and set
            `weight.grad_added_to_main_grad`, as megatron-core's LinearWithGradAccumulationAndAsyncCommunication does
            under `gradient_accumulation_fusion`.
        implementation: "triton" handles logits in Triton kernels, "portable" in torch. "auto" is Triton on CUDA if it
            is installed. float64 always uses "portable".

    Returns:
        log_prob (T,) float32 in nats, <= 0, and entropy (T,) float32 in nats, in [0, ln vocab_size], or None.
        float64 inputs give float64.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit together, a temperature that is not positive, a label
            outside the vocabulary, a vocab_size beyond the columns, ranks that disagree, a chunk_bytes too small for a
            single logit, no `weight.main_grad` to accumulate into, or an implementation that cannot run here.
    """
    _check(hidden, weight, labels, bias, temperature, vocab_size)
    needs_main_grad = accumulate_into_main_grad and weight.requires_grad and torch.is_grad_enabled()
    if needs_main_grad and getattr(weight, "main_grad", None) is None:
        raise ValueError("accumulate_into_main_grad needs weight.main_grad; wrap the model in Megatron's DDP")
    shard = VocabularyShard.describe(labels, weight.size(0), vocab_size, group)
    work = _choose(implementation, hidden)
    if chunk_bytes is None:
        chunk_bytes = tiles.default_budget(on_cpu=hidden.device.type == "cpu")
    settings = Settings(float(temperature), shard, chunk_bytes, with_entropy, accumulate_into_main_grad, work)
    settings.check_budget(hidden)
    return _LinearLogProbAndEntropy.apply(hidden, weight, bias, labels, settings)


def log_prob_and_entropy(
    logits: Tensor, labels: Tensor, *, temperature: float, implementation: Implementation = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute log p(label) and the entropy of p = softmax(logits / temperature), from existing logits.

    Not differentiable. Same arithmetic and dtype as `linear_log_prob_and_entropy`.

    Args:
        logits: (T, V), unsharded; not modified. -inf removes a column.
        labels: (T,) int64.
        temperature, implementation: as for `linear_log_prob_and_entropy`.

    Returns:
        log_prob (T,) and entropy (T,) in nats; NaN where all logits of a row are NaN or one is +inf.
    """
    statistics = _choose(implementation, logits).statistics(logits, labels, 1 / (math.log(2) * temperature))
    return statistics.log_prob(temperature), statistics.entropy(logits.size(1))


def _check(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, temperature: float, vocab_size: int | None
) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.size(1) != weight.size(1):
        raise ValueError(
            f"hidden must be (T, H) and weight (V, H), but they are {tuple(hidden.shape)} and {tuple(weight.shape)}"
        )
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels must be ({hidden.size(0)},) as hidden is, but it is {tuple(labels.shape)}")
    if labels.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise ValueError(f"labels must be integers, but they are {labels.dtype}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be ({weight.size(0)},) as weight is, but it is {tuple(bias.shape)}")
    if not hidden.is_floating_point() or hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must share one float dtype, but are {hidden.dtype} and {weight.dtype}")
    if any(tensor is not None and tensor.device != hidden.device for tensor in (weight, labels, bias)):
        raise ValueError(f"weight, labels and bias must be on the device of hidden, {hidden.device}")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite, but it is {temperature}")
    if vocab_size is not None and vocab_size < 1:
        raise ValueError(f"vocab_size must be at least 1, but it is {vocab_size}")


def _choose(implementation: Implementation, hidden: Tensor) -> type[TileWork]:
    """Choose the class that handles tiles of logits for inputs like `hidden`."""
    if implementation not in ("auto", "portable", "triton"):
        raise ValueError(f"implementation must be auto, portable or triton, but it is {implementation!r}")
    has_triton = importlib.util.find_spec("triton") is not None
    if implementation == "portable" or hidden.dtype == torch.float64:
        return PortableTile
    if implementation == "auto" and not (hidden.is_cuda and has_triton):
        return PortableTile
    if not has_triton:
        raise ValueError("implementation is triton, but the package triton is not installed")
    if not hidden.is_cuda:
        from triton import knobs

        if not knobs.runtime.interpret:
            raise ValueError(
                f"implementation is triton, but hidden is on {hidden.device}: its kernels need a CUDA device, or "
                "TRITON_INTERPRET=1"
            )
    from .kernels import TritonTile

    return TritonTile


class _LinearLogProbAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, settings: Settings
    ) -> tuple[Tensor, Tensor | None]:
        labels = labels.long() - settings.shard.offset
        log_prob, entropy, normalizer = forward(hidden, weight, bias, labels, settings)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden, weight, bias, labels, normalizer, entropy)
        return log_prob, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_prob: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels, normalizer, entropy = ctx.saved_tensors
        gradient = LogitGradient.of(grad_log_prob, grad_entropy, entropy, normalizer, ctx.settings.temperature)
        grads = backward(hidden, weight, bias, labels, gradient, ctx.settings, ctx.needs_input_grad[:3])
        return *grads, None, None
