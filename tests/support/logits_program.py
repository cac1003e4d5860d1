"""The functions that ranks run in the tests of the model: log-probs, entropies and logits at a layout."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.token_values import MicroBatch

_current: list[Layout] = []


@contextmanager
def on(layout: Layout) -> Iterator[None]:
    """Megatron's groups for ``layout`` over all ranks of the pool, removed afterwards; does nothing if nested."""
    if _current:
        assert _current == [layout]
        yield
        return
    groups.initialize(layout, seed=1)
    _current.append(layout)
    try:
        yield
    finally:
        _current.clear()
        groups.destroy()


def several(layout: Layout, calls: list[tuple[Callable, tuple]]) -> list[Any]:
    """Run several functions :func:`on` one layout, since creating its groups takes longer than most of them."""
    with on(layout):
        return [function(*args) for function, args in calls]


def all_actions(rows: list[list[int]]) -> MicroBatch:
    """A micro-batch in which every token but each row's first is an action."""
    return [(torch.tensor(row), torch.arange(len(row)) > 0) for row in rows]


def logits(source: str, layout: Layout, micro_batches: list[list[list[int]]]) -> list[Any]:
    """(tokens, V) logits of every micro-batch, on the last stage's first tensor-parallel rank; empty elsewhere."""
    with on(layout):
        model = load_model(source, ModelOptions(layout=layout, dtype=torch.float32))
        return [result.numpy() for result in _logits(model, micro_batches)]


def logits_of_hub(name: str, fetched: str, *args: Any) -> list[Any]:
    """:func:`logits` of the Hub model ``name``, whose download is replaced by the folder ``fetched``."""
    with mock.patch("huggingface_hub.snapshot_download", lambda asked, **patterns: {name: fetched}[asked]):
        return logits(name, *args)


@torch.no_grad()
def _logits(model: LoadedModel, micro_batches: list[list[list[int]]]) -> list[torch.Tensor]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        gather_from_sequence_parallel_region,
        gather_from_tensor_model_parallel_region,
    )

    found: list[torch.Tensor] = []

    def keep_logits(hidden: torch.Tensor, packed: Any, with_entropy: bool) -> tuple[torch.Tensor, torch.Tensor]:
        if model.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden)
        stage = model.stage
        tied = stage.share_embeddings_and_output_weights
        weight = stage.shared_embedding_or_output_weight() if tied else stage.output_layer.weight
        whole = gather_from_tensor_model_parallel_region(hidden.squeeze(1) @ weight.T)
        real = sum(batch_lengths[len(found)])
        found.append(whole[:real, : stage.real_vocab_size])
        zeros = hidden.new_zeros(packed.labels.numel())
        return zeros, zeros

    batch_lengths = [[len(row) for row in rows] for rows in micro_batches]
    model.stage._log_probs = keep_logits
    model.stage.eval()
    schedule.forward(model, [all_actions(rows) for rows in micro_batches])
    return found if parallel_state.get_tensor_model_parallel_rank() == 0 else []


def log_probs_and_entropies(
    source: str, layout: Layout, dtype: str, temperature: float, micro_batches: list[list[list[int]]]
) -> list[tuple[Any, Any]]:
    """(log-probs, entropies) of every micro-batch's actions, (N,) each."""
    with on(layout):
        options = ModelOptions(layout=layout, dtype=getattr(torch, dtype), temperature=temperature)
        model = load_model(source, options)
        model.stage.eval()
        batches = [all_actions(rows) for rows in micro_batches]
        return [(s.log_probs.numpy(), s.entropy.numpy()) for s in schedule.forward(model, batches)]


def full_weights(source: str, layout: Layout, dtype: str, buckets: list[int]) -> dict[str, Any]:
    """Name -> tensor as the weight transfer sees them, on every rank; checked to be the same for all ``buckets``."""
    from openrlhf_gtpo.megatron.model.weights import FullWeights

    with on(layout):
        model = load_model(source, ModelOptions(layout=layout, dtype=getattr(torch, dtype)))
        found = []
        for bucket_bytes in buckets:
            weights = FullWeights(model, bucket_bytes)
            tensors = {name: tensor.clone() for name, tensor in weights.tensors()}
            announced = [entry for bucket in weights.buckets for entry in bucket]
            assert [(name, tuple(tensor.shape)) for name, tensor in tensors.items()] == announced
            found.append(tensors)
        assert all(torch.equal(other[name], tensor) for other in found for name, tensor in tensors.items())
        return {name: tensor.float().numpy() for name, tensor in tensors.items()}


def head_without_room(source: str) -> str:
    """The error message of a forward pass whose LM head may use only one byte."""
    with on(Layout()):
        model = load_model(source, ModelOptions(lm_head_bytes=1))
        try:
            schedule.forward(model, [all_actions([[1, 2, 3, 4]])])
        except ValueError as error:
            return str(error)
        return ""


def sft_losses(source: str, layout: Layout, rows: list[list[int]], steps: int) -> list[float]:
    """Mean negative log-prob of ``rows`` before each of ``steps`` optimizer steps; empty except on a last stage."""
    from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer

    with on(layout):
        model = load_model(source, ModelOptions(layout=layout, dtype=torch.float32))
        trainer = Trainer(model, OptimizerOptions(lr=1e-2))
        batch = all_actions(rows)

        def loss(index: int, log_probs: torch.Tensor, entropy: torch.Tensor | None) -> tuple[torch.Tensor, float]:
            value = -log_probs.mean()
            return value, float(value.detach())

        return [value for _ in range(steps) for value in trainer.step([batch], loss).kept]


def threads() -> int:
    """The number of this process's threads: each gloo group has three. A thread that has been joined is listed until
    the kernel has reaped it, which takes a moment on a busy machine; one that was left behind stays."""
    counts = []
    for _ in range(10):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.05)
    return min(counts)


def devices_of_groups() -> tuple[list[str], str]:
    """The devices that Megatron's groups connect at once, and then the default group's, which had one before."""
    default = torch.distributed.group.WORLD
    default.bound_device_id = torch.device("cpu", 0)
    try:
        with on(Layout()):
            return [str(group.bound_device_id) for group in groups._made], str(default.bound_device_id)
    finally:
        default.bound_device_id = None


def offloaded_twin(
    source: str, layout: Layout, dtype: str, distributed: bool, rows: list[list[int]]
) -> tuple[list[float], list[float], bool]:
    """Losses and norms of three steps, without and with offloading between them, and whether it freed the memory."""
    from openrlhf_gtpo.megatron.train.offload import Offload
    from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer

    batch = all_actions(rows)
    freed = True

    def train(offloading: bool) -> list[float]:
        nonlocal freed
        model = load_model(source, ModelOptions(layout=layout, dtype=getattr(torch, dtype)))
        trainer = Trainer(model, OptimizerOptions(lr=1e-2, distributed=distributed))
        offload = Offload(trainer)
        numbers = []
        for _ in range(3):
            if offloading:
                offload.optimizer()
                forward_still_works = schedule.forward(model, [batch])[0].log_probs
                offload.parameters()
                freed &= all(p.untyped_storage().nbytes() == 0 for p in model.stage.parameters())
                freed &= all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in trainer.ddp.buffers)
                offload.restore(optimizer=False)
                assert torch.equal(forward_still_works, schedule.forward(model, [batch])[0].log_probs)
                offload.restore()
            report = trainer.step([batch], lambda i, log_probs, entropy: (-log_probs.sum(), float(log_probs.sum())))
            numbers += [report.grad_norm, *report.kept]
        return numbers

    with on(layout):
        return train(False), train(True), freed


def pinned_memory(source: str) -> tuple[list[int], int]:
    """Bytes that offloading pins (negative: unpins), in order, over a start and three steps; parameter count."""
    from openrlhf_gtpo.megatron.parallel import host
    from openrlhf_gtpo.megatron.train import offload
    from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer

    pinned: dict[int, int] = {}
    calls: list[int] = []

    def pin(address: int, size: int) -> None:
        pinned[address] = size
        calls.append(size)

    played = {"on_cuda": lambda: True, "pin_memory": pin, "unpin_memory": lambda at: calls.append(-pinned.pop(at))}
    with on(Layout()):
        model = load_model(source, ModelOptions(layout=Layout()))
        trainer = Trainer(model, OptimizerOptions())
        mover = offload.Offload(trainer)
        for step in range(4):
            mover.restore()
            if step:
                batch = all_actions([[1, 2, 3, 4]])
                trainer.step([batch], lambda i, log_probs, entropy: (-log_probs.sum(), None))
            with mock.patch.multiple(host, **played):
                mover.optimizer()
                mover.parameters()
        return list(calls), sum(parameter.numel() for parameter in model.stage.parameters())
