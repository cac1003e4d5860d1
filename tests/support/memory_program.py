"""The program of the ranks in the tests of the planner's memory: optimizer steps, and the peak bytes of their tensors.

Memory that a trainer holds throughout is counted from its storages; memory that comes and goes in a step, from every
allocation of torch's CPU allocator, as its profiler reports them. Both are exact; resident memory is not. Matrix
products are zeros: no byte depends on their values, and a CPU without bfloat16 instructions takes minutes for them.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.suite.random_model import random_model
from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support.logits_program import on
from tests.support.training_program import batch_of, gtpo_loss

_STEP = "planner: step"


def measure(
    config: dict, layout: Layout, recompute: str, distributed: bool, rows: list, lora_rank: int = 0
) -> dict[str, Any]:
    """Bytes on this rank: ``weights``, ``gradients``, ``optimizer``, and ``beside``, the most a step adds to them.

    Args:
        rows: (tokens of the rows, lengths of the prompts) per micro-batch; every replica gets all of them.
        lora_rank: of adapters that are trained in the place of the weights.
    """
    with on(layout), _products_are_zeros():
        lora = LoraOptions(lora_rank, 2 * lora_rank) if lora_rank else None
        model = random_model(config, ModelOptions(layout=layout, recompute=recompute, lora=lora), seed=1)
        trainer = Trainer(model, OptimizerOptions(distributed=distributed))
        batches = [batch_of(*row) for row in rows]
        loss = gtpo_loss(batches, list(range(len(batches))), 1000.0, False)
        tokens, prompts = rows[0]
        short = [batch_of([tokens[0][:32]], prompts[:1])]
        trainer.step(short, gtpo_loss(short, [0], 1000.0, False))  # creates the optimizer's states
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, record_function(_STEP):
            trainer.step(batches, loss)
        holder = Offload(trainer)
        weights = _storages(holder._parameters())
        gradients = _storages(buffer.grad_data for buffer in trainer.ddp.buffers)
        return {
            "weights": sum(weights.values()),
            "gradients": sum(gradients.values()),
            "optimizer": sum(s for at, s in _storages(holder._optimizer_tensors()).items() if at not in weights),
            "beside": _most_beside(profiler),
        }


@contextmanager
def _products_are_zeros() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm", lambda a, b: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    library.impl("bmm", lambda a, b: a.new_zeros(*a.shape[:2], b.shape[2]), "CPU")
    library.impl("addmm", lambda c, a, b, **factors: a.new_zeros(a.shape[0], b.shape[1]), "CPU")
    library.impl("baddbmm", lambda c, a, b, **factors: a.new_zeros(*a.shape[:2], b.shape[2]), "CPU")
    try:
        yield
    finally:
        library._destroy()


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of each storage by its address, so that shared storages count once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _most_beside(profiler: Any) -> int:
    """The most bytes live at once of those allocated since the profiler began; frees of older memory do not count.

    gloo's threads free the copies that they send at any time and unseen, so a copy counts only when it is made.
    """
    events = []
    waiting = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while waiting:
        event, copies = waiting.pop()
        copies = copies or event.name.startswith(("c10d::", "gloo:"))
        waiting.extend((child, copies) for child in event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size, copies))
    live: dict[int, int] = {}
    total = most = 0
    for _, address, size, is_copy in sorted(events, key=lambda event: event[0]):
        if size > 0:
            most = max(most, total + size)
        if not is_copy:
            total += size if size > 0 else -live.pop(address, 0)
            live |= {address: size} if size > 0 else {}
    return most
