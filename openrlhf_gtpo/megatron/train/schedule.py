"""Micro-batches through the pipeline: Megatron's schedules, with the loss handed in as a callable."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from openrlhf_gtpo.megatron.model.packing import Packed, pack
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.token_batch import TokenBatch
from openrlhf_gtpo.megatron.parallel.host import device, megatron_calls
from openrlhf_gtpo.token_values import TokenValues

# (index of the micro-batch, log-probs (B, A), entropies (B, A) or None) to (scalar, what the caller wants back).
# The scalars add up over micro-batches and data-parallel replicas: their sum is what is minimised.
Loss = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Any]]


@torch.no_grad()
def forward(model: LoadedModel, batches: Sequence[TokenBatch]) -> list[TokenValues]:
    """(B, A) float32 values of every micro-batch on the CPU of every rank of the replica; the model is left in eval mode."""
    if model.fp8 is not None and not model.fp8.calibrated:
        _calibrate(model, batches[:1])
    model.stage.eval()

    def collect(index: int, packed: Packed, output: Any, non_loss_data: bool) -> TokenValues:
        assert non_loss_data
        log_probs, entropy = output
        return TokenValues(packed.place(log_probs), packed.place(entropy))

    results = _run(model, model.stage, batches, collect, with_entropy=True, forward_only=True)
    return [_from_last_stage(batch, results[i] if results else None) for i, batch in enumerate(batches)]


def forward_backward(
    model: LoadedModel, ddp: torch.nn.Module, batches: Sequence[TokenBatch], loss: Loss, *, with_entropy: bool
) -> list[Any]:
    """Forward and backward of every micro-batch, gradients reduced over the data-parallel group.

    Args:
        ddp: the model's stage with its gradient buffers.

    Returns:
        what ``loss`` gave beside its scalars, one entry a micro-batch; empty on all but the last stage.
    """
    no_tokens = torch.zeros((), dtype=torch.int)  # Megatron would divide the gradient by their number

    def apply(index: int, packed: Packed, output: Any) -> tuple[Tensor, Tensor, Any]:
        log_probs, entropy = output
        value, kept = loss(index, packed.place(log_probs), None if entropy is None else packed.place(entropy))
        return value, no_tokens, kept

    return _run(model, ddp, batches, apply, with_entropy=with_entropy, forward_only=False)


def _calibrate(model: LoadedModel, batches: Sequence[TokenBatch]) -> None:
    """A forward whose results count for nothing: delayed scales follow training passes alone, and they have seen none."""
    assert model.fp8 is not None

    def drop(index: int, packed: Packed, output: Any, non_loss_data: bool) -> None:
        assert non_loss_data

    model.stage.train()
    with torch.enable_grad():
        _run(model, model.stage, batches, drop, with_entropy=False, forward_only=True)
    model.fp8.calibrated = True


def _run(
    loaded: LoadedModel,
    stage: torch.nn.Module,
    batches: Sequence[TokenBatch],
    finish: Callable,
    *,
    with_entropy: bool,
    forward_only: bool,
) -> list[Any]:
    config = loaded.config
    context = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def step(data: Iterator[tuple[int, TokenBatch]], model: torch.nn.Module) -> tuple[Any, Callable]:
        index, batch = next(data)
        packed = pack(batch, device(), config.token_multiple, context)
        output = model(packed, with_entropy=with_entropy)
        if isinstance(output, tuple):
            output = _Output(output)
        return output, partial(finish, index, packed) if index < len(batches) else _count_nothing

    # A replica without a micro-batch reduces gradients with the others, and those that share experts wait for each other in
    # every micro-batch: what is missing is filled up with a row of which nothing counts.
    needed = max(1, len(batches))
    if config.expert_model_parallel_size > 1:
        needed = _most_micro_batches(needed)
    work = [*batches, *[_company()] * (needed - len(batches))]
    with megatron_calls(), loaded.fp8.weights_kept() if loaded.fp8 else nullcontext():
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(enumerate(work)),
            model=[stage],
            num_microbatches=len(work),
            # Shapes differ between micro-batches, and stages tell each other (variable_seq_lengths).
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    return results[: len(batches)]


class _Output(tuple):
    """What a last stage returns. Of a model with experts, Megatron's schedules ask for its device."""

    @property
    def device(self) -> torch.device:
        return self[0].device


def _company() -> TokenBatch:
    """Two tokens, the second an action."""
    tokens = torch.zeros(1, 2, dtype=torch.long)
    return TokenBatch(tokens, torch.ones_like(tokens), torch.ones(1, 1, dtype=torch.long))


def _count_nothing(output: tuple[Tensor, Tensor | None], non_loss_data: bool = False) -> tuple[Tensor, Tensor, None]:
    """The loss of a micro-batch that is only there to keep other replicas company."""
    return output[0].sum() * 0.0, torch.zeros((), dtype=torch.int), None


def _most_micro_batches(mine: int) -> int:
    """Of any replica."""
    most = torch.tensor(mine, device=device())
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
    return int(most)


def _from_last_stage(batch: TokenBatch, values: TokenValues | None) -> TokenValues:
    """The last stage's result, on the CPU of every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        shape = (2, *batch.action_mask.shape)
        both = torch.stack(values) if values else torch.empty(shape, device=device())
        torch.distributed.broadcast(
            both,
            src=parallel_state.get_pipeline_model_parallel_last_rank(),
            group=parallel_state.get_pipeline_model_parallel_group(),
        )
        values = TokenValues(both[0], both[1])
    assert values is not None
    return TokenValues(values.log_probs.cpu(), values.entropy.cpu())
