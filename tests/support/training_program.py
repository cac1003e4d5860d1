"""Functions that ranks run in training tests: gradients and optimizer steps at a layout, as Hugging Face tensors."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from openrlhf_gtpo.algorithms import policy_surrogate
from openrlhf_gtpo.megatron.model.layers import NormColumnParallelLinear
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.token_values import MicroBatch
from tests.support.logits_program import on

TEMPERATURE = 0.8
ENTROPY_COEFFICIENT = 0.05


def batch_of(rows: list[list[int]], prompts: list[int]) -> MicroBatch:
    """A micro-batch in which the first ``prompts[i]`` tokens of row i are its prompt."""
    return [(torch.tensor(row), torch.arange(len(row)) >= prompt) for row, prompt in zip(rows, prompts, strict=True)]


def actions(micro_batch: MicroBatch) -> int:
    """The number N of actions."""
    return sum(int(marks.sum()) for _, marks in micro_batch)


def gtpo_loss(batches: list[MicroBatch], seeds: list[int], tokens: float, entropy: bool) -> Callable:
    """The token-level policy loss over all ``tokens`` actions of a step, with an entropy bonus if asked for.

    Old log-probs and advantages (N,) are drawn from ``seeds``, so they are the same wherever they are drawn.
    """

    def loss(index: int, log_probs: torch.Tensor, entropies: torch.Tensor | None) -> tuple[torch.Tensor, float]:
        generator = torch.Generator().manual_seed(seeds[index])
        shape = (1, actions(batches[index]))
        old = -4.5 + 0.3 * torch.randn(shape, generator=generator)
        advantages = torch.randn(shape, generator=generator)
        mask = torch.ones(shape, dtype=torch.bool)
        value = policy_surrogate(log_probs[None], old, advantages, mask, level="token").loss.sum() / tokens
        if entropy:
            assert entropies is not None
            value = value - ENTROPY_COEFFICIENT * entropies.sum() / tokens
        return value, float(value.detach())

    return loss


def _share(items: list, layout: Layout) -> tuple[list, list[int]]:
    """This replica's micro-batches and their indices."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    indices = list(range(len(items)))[rank::size]
    return [items[i] for i in indices], indices


def _make(source: str, options: ModelOptions, optimizer: OptimizerOptions) -> Trainer:
    return Trainer(load_model(source, options), optimizer)


def gradients(source: str, layout: Layout, options: dict, steps: list[list[tuple[list, list]]], entropy: bool) -> Any:
    """Name -> gradient (numpy) of the first step's loss, on rank 0; empty elsewhere."""
    with on(layout):
        model_options = ModelOptions(layout=layout, dtype=torch.float32, temperature=TEMPERATURE, **options)
        trainer = _make(source, model_options, OptimizerOptions(max_norm=0, distributed=False))
        batches = [batch_of(*item) for item in steps[0]]
        tokens = float(sum(map(actions, batches)))
        mine, seeds = _share(batches, layout)
        found: dict[str, Any] = {}

        def keep_gradients() -> tuple[bool, float, None]:
            found.update(_named(trainer.model, lambda parameter: parameter.main_grad))
            return True, 0.0, None

        trainer.optimizer.step = keep_gradients
        trainer.step(mine, gtpo_loss(mine, seeds, tokens, entropy), with_entropy=entropy)
        return found if torch.distributed.get_rank() == 0 else {}


class _AddsToMainGrad(torch.autograd.Function):
    """A weight whose layer adds the gradient to ``main_grad`` itself, as Transformer Engine's layers do, and gives
    autograd something else."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        context.weight = weight
        return weight.detach()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        context.weight.main_grad += gradient
        context.weight.grad_added_to_main_grad = True
        return torch.full_like(gradient, torch.nan)


def fused_gradients(*args: Any) -> tuple[Any, int]:
    """:func:`gradients` with layers that accumulate as Transformer Engine's do, and the number of passes that did."""
    plain, passes = NormColumnParallelLinear.forward, []

    def forward(layer: Any, hidden: torch.Tensor) -> Any:
        passes.append(layer.fuse_wgrad_accumulation)
        return plain(layer, hidden, _AddsToMainGrad.apply(layer.weight) if passes[-1] else None)

    patched = {"forward": forward, "fuse_wgrad_accumulation": False}
    with mock.patch.multiple(NormColumnParallelLinear, create=True, **patched):
        return gradients(*args), sum(passes)


def deterministic_gradients(*args: Any) -> Any:
    """:func:`gradients` as ``--train.full_determinism_enable`` has torch compute them."""
    torch.use_deterministic_algorithms(True)
    try:
        assert ModelOptions().fields()["deterministic_mode"]
        return gradients(*args)
    finally:
        torch.use_deterministic_algorithms(False)


def train(
    source: str, layout: Layout, distributed: bool, steps: list[list[tuple[list, list]]], optimizer: dict
) -> tuple[dict[str, Any], list[float], list[float]]:
    """Parameters after all steps (rank 0), gradient norms, and each step's loss summed over replicas."""
    with on(layout):
        options = ModelOptions(layout=layout, dtype=torch.float32, temperature=TEMPERATURE)
        trainer = _make(source, options, OptimizerOptions(distributed=distributed, **optimizer))
        norms, losses = [], []
        for step in steps:
            batches = [batch_of(*item) for item in step]
            tokens = float(sum(map(actions, batches)))
            mine, seeds = _share(batches, layout)
            report = trainer.step(mine, gtpo_loss(mine, seeds, tokens, False))
            norms.append(report.grad_norm)
            losses.append(_sum_over_ranks(sum(report.kept)) / layout.tensor_model_parallel_size)
        parameters = _named(trainer.model, lambda parameter: parameter.data)
        return (parameters if torch.distributed.get_rank() == 0 else {}), norms, losses


def _sum_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(total)
    return float(total)


def _named(model: LoadedModel, of: Callable) -> dict[str, Any]:
    """Hugging Face name -> full tensor of ``of(parameter)``, gathered over the shards."""
    return {name: tensor.float().clone().numpy() for name, tensor in FullWeights(model, 2**30, of).tensors()}
