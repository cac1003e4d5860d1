"""Runs micro-batches through the pipeline with Megatron's schedules; the loss is passed in as a callable."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from openrlhf_gtpo.megatron.model.packing import pack, pack_shared
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel.host import device, megatron_calls
from openrlhf_gtpo.token_values import MicroBatch, TokenValues

# Maps (micro-batch index, log-probs (N,) of its actions, row after row, their entropies (N,) or None) to (scalar, what
# the caller wants back). The scalars add up over micro-batches and data-parallel replicas, and their sum is minimized.
Loss = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Any]]


@torch.no_grad()
def forward(model: LoadedModel, micro_batches: Sequence[MicroBatch]) -> list[TokenValues]:
    """(N,) float32 values of the actions of every micro-batch, row after row, on the CPU of every rank of the replica.

    The model is left in eval mode.
    """
    _calibrate(model, micro_batches[:1])
    model.stage.eval()

    def collect(index: int, output: Any, non_loss_data: bool) -> TokenValues:
        assert non_loss_data
        return TokenValues(*output)

    results = _run(model, model.stage, micro_batches, collect, with_entropy=True, forward_only=True)
    return [_from_last_stage(rows, results[i] if results else None) for i, rows in enumerate(micro_batches)]


def forward_backward(
    model: LoadedModel,
    ddp: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    loss: Loss,
    *,
    with_entropy: bool,
) -> list[Any]:
    """Run forward and backward on every micro-batch, and reduce gradients over the data-parallel group.

    Args:
        ddp: the model's stage with its gradient buffers.

    Returns:
        what ``loss`` returned besides its scalars, one entry per micro-batch; empty on all but the last stage.
    """
    _calibrate(model, micro_batches[:1])
    no_tokens = torch.zeros((), dtype=torch.int)  # finalize_model_grads would divide the gradient by their number

    def apply(index: int, output: Any) -> tuple[Tensor, Tensor, Any]:
        value, kept = loss(index, *output)
        return value, no_tokens, kept

    return _run(model, ddp, micro_batches, apply, with_entropy=with_entropy, forward_only=False)


def _calibrate(model: LoadedModel, micro_batches: Sequence[MicroBatch]) -> None:
    """Run a forward pass and drop its results, if that is needed: delayed scales follow only training passes, and have
    seen none. A replica without rows waits for its first ones."""
    if model.fp8 is None or model.fp8.calibrated or not micro_batches:
        return

    def drop(index: int, output: Any, non_loss_data: bool) -> None:
        assert non_loss_data

    model.stage.train()
    with torch.enable_grad():
        _run(model, model.stage, micro_batches, drop, with_entropy=False, forward_only=True)
    model.fp8.calibrated = True


def _run(
    loaded: LoadedModel,
    stage: torch.nn.Module,
    micro_batches: Sequence[MicroBatch],
    finish: Callable,
    *,
    with_entropy: bool,
    forward_only: bool,
) -> list[Any]:
    config = loaded.config
    context = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()

    def step(data: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[Any, Callable]:
        index, rows = next(data)
        if config.shares_prompts:
            packed = pack_shared(rows, device(), config.token_multiple)
        else:
            packed = pack(rows, device(), config.token_multiple, context)
        output = model(packed, with_entropy=with_entropy)
        if isinstance(output, tuple):
            output = _Output(output)
        return output, partial(finish, index) if index < len(micro_batches) else _count_nothing

    # A replica without micro-batches still reduces gradients with the others, and replicas that share experts wait for
    # each other in every micro-batch. A row that does not count stands in for missing micro-batches.
    needed = max(1, len(micro_batches))
    if config.expert_model_parallel_size > 1:
        most = torch.tensor(needed, device=device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=group)
        needed = int(most)
    company = torch.zeros(2, dtype=torch.long), torch.tensor([False, True])  # the second token is an action
    work = [*micro_batches, *[[company]] * (needed - len(micro_batches))]
    with megatron_calls(), loaded.fp8.weights_kept() if loaded.fp8 else nullcontext():
        results = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(enumerate(work)),
            model=[stage],
            num_microbatches=len(work),
            # Shapes differ between micro-batches, and stages tell each other theirs (variable_seq_lengths).
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
    if forward_only and loaded.fp8:
        loaded.fp8.forget_recomputation()
    for clean_up in loaded.after_pass:
        clean_up()
    return results[: len(micro_batches)]


class _Output(tuple):
    """The output of a last stage. If the model has experts, Megatron's schedules ask it for its device (megatron-core
    0.16.1, 0.19.2: pipeline_parallel/schedules.py, forward_step_calc_loss)."""

    @property
    def device(self) -> torch.device:
        return self[0].device


def _count_nothing(output: tuple[Tensor, Tensor | None], non_loss_data: bool = False) -> tuple[Tensor, Tensor, None]:
    """The loss of a dummy micro-batch, with which a replica takes part in the others' collectives."""
    return output[0].sum() * 0.0, torch.zeros((), dtype=torch.int), None


def _from_last_stage(rows: MicroBatch, values: TokenValues | None) -> TokenValues:
    """The last stage's result, on the CPU of every stage."""
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        actions = sum(int(row[1].sum()) for row in rows)
        both = torch.stack(values) if values else torch.empty(2, actions, device=device())
        if actions:
            torch.distributed.broadcast(
                both,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        values = TokenValues(*both)
    assert values is not None
    return TokenValues(values.log_probs.cpu(), values.entropy.cpu())
