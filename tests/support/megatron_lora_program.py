"""Functions that ranks run in the tests of adapters: gradients, steps, what is sent and written, and resumed runs."""

import zlib
from dataclasses import replace
from typing import Any

import torch

from openrlhf_gtpo.lora import LoraOptions
from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.checkpoint.export import save_hf
from openrlhf_gtpo.megatron.model.adapters import adapters_of, full_adapters
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.token_values import MicroBatch
from tests.support import checkpoint_program
from tests.support.families import ragged_rows
from tests.support.logits_program import all_actions, on
from tests.support.training_program import TEMPERATURE, actions, batch_of, gtpo_loss

SEED = 7
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 500}


def load(source: str, layout: Layout, lora: LoraOptions | None, dtype: str = "float32", **more: Any) -> LoadedModel:
    options = ModelOptions(layout=layout, dtype=getattr(torch, dtype), temperature=TEMPERATURE, lora=lora, seed=SEED)
    return load_model(source, replace(options, **more))


def b_of(name: str, out: int, rank: int) -> torch.Tensor:
    """A B (out, r) that is not zero, the same wherever it is drawn; ``name`` is the weight's."""
    return 0.05 * torch.randn(out, rank, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


@torch.no_grad()
def _set_b(model: LoadedModel) -> None:
    from megatron.core import parallel_state

    tp, tp_rank = model.options.layout.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    for adapters in adapters_of(model.stage).values():
        for name, _, b in adapters.pairs():
            rows = b.shape[0] if b.tensor_model_parallel else b.shape[0] // tp
            whole = b_of(name, rows * tp, b.shape[1])
            b.copy_(whole.split(rows)[tp_rank] if b.tensor_model_parallel else whole)


def _share(step: list[tuple[list, list]]) -> tuple[list[MicroBatch], list[int], float]:
    """This replica's micro-batches, their indices, and the number of all replicas' actions."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    batches = [batch_of(*item) for item in step]
    return batches[rank::size], list(range(len(batches)))[rank::size], float(sum(map(actions, batches)))


@torch.no_grad()
def _adapters(model: LoadedModel) -> dict[str, tuple[Any, Any]]:
    pairs = full_adapters(model.stage)
    return {name: (a.float().numpy(), b.float().numpy()) for name, (a, b) in pairs.items()}


def adapter_gradients(
    source: str, layout: Layout, lora: LoraOptions, step: list, recompute: str, shares: bool = False
) -> Any:
    """Module -> gradients (of A, of B) of one step's loss where B is :func:`b_of`."""
    with on(layout):
        model = load(source, layout, lora, recompute=recompute, shares_prompts=shares)
        _set_b(model)
        trainer = Trainer(model, OptimizerOptions(max_norm=0, distributed=False))
        mine, seeds, tokens = _share(step)
        found: dict[str, Any] = {}

        def keep_gradients() -> tuple[bool, float, None]:
            with torch.no_grad():
                for parameter in model.stage.parameters():
                    if parameter.requires_grad:
                        parameter.copy_(parameter.main_grad)
            found.update(_adapters(model))
            return True, 0.0, None

        trainer.optimizer.step = keep_gradients
        trainer.step(mine, gtpo_loss(mine, seeds, tokens, False))
        return found


def train(
    source: str, layout: Layout, lora: LoraOptions, distributed: bool, steps: list, optimizer: dict, more: dict
) -> tuple[dict[str, tuple[Any, Any]], list[float], list[float]]:
    """A and B after all steps, each step's loss summed over replicas, and its gradient norm."""
    with on(layout):
        model = load(source, layout, lora, **more)
        trainer = Trainer(model, OptimizerOptions(distributed=distributed, **optimizer))
        losses, norms = [], []
        for number, step in enumerate(steps, start=1):
            mine, seeds, tokens = _share(step)
            loss = gtpo_loss(mine, seeds, tokens, False)
            report = trainer.step(mine, loss, another_follows=number < len(steps))
            norms.append(report.grad_norm)
            total = torch.tensor(sum(report.kept), dtype=torch.float64)
            torch.distributed.all_reduce(total)
            losses.append(float(total) / layout.tensor_model_parallel_size / layout.context_parallel_size)
        return _adapters(model), losses, norms


def outputs(source: str, layout: Layout, lora: LoraOptions, folder: str, lr: float) -> dict[str, Any]:
    """Train in bfloat16 and export into ``folder``, twice; return what is sent, and log-probs of the untouched base,
    and of the policy without and with its adapters once its memory has been away."""
    with on(layout):
        batch = all_actions(ragged_rows(151, [9, 4, 7], seed=99))
        base = schedule.forward(load(source, layout, None, "bfloat16"), [batch])[0].log_probs
        model = load(source, layout, lora, "bfloat16")
        trainer = Trainer(model, OptimizerOptions(lr=lr))
        for _ in range(3):
            trainer.step([batch], lambda i, log_probs, entropy: (-log_probs.mean(), None))
            save_hf(trainer, source, folder, shard_bytes=64 * 2**10)
        sent = {name: tensor.clone() for name, tensor in FullWeights(model, 2**16).tensors()}
        offload = Offload(trainer)
        offload.optimizer()
        offload.parameters()
        offload.restore(optimizer=False)
        with model.without_adapters():
            without = schedule.forward(model, [batch])[0].log_probs
        adapted = schedule.forward(model, [batch])[0].log_probs
        return {"sent": sent, "base": base, "without": without, "adapted": adapted}


def _trainer(source: str, layout: Layout, lora: LoraOptions | None, distributed: bool = True) -> Trainer:
    return Trainer(load(source, layout, lora), OptimizerOptions(lr=5e-3, weight_decay=0.1, distributed=distributed))


def save_and_go_on(source: str, layout: Layout, lora: LoraOptions, folder: str, distributed: bool) -> list:
    """Take three steps, save, and return the reports of two more."""
    with on(layout):
        trainer = _trainer(source, layout, lora, distributed)
        checkpoint_program.train(trainer, range(3))
        Checkpoints(folder).save("step3", trainer, {})
        return checkpoint_program.train(trainer, range(3, 5))


def resume(source: str, layout: Layout, lora: LoraOptions | None, folder: str, distributed: bool) -> Any:
    """The same two steps after a load; what the load said if it was refused."""
    with on(layout):
        trainer = _trainer(source, layout, lora, distributed)
        try:
            Checkpoints(folder).load(trainer)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return checkpoint_program.train(trainer, range(3, 5))


def load_beside_nothing(source: str, lora: LoraOptions) -> str:
    """What is said if the products beside which adapters stand are not found."""
    from openrlhf_gtpo.megatron.model import adapters

    found, adapters.adapters_of = adapters.adapters_of, lambda stage: {}
    try:
        with on(Layout()):
            load(source, Layout(), lora)
    except AssertionError as error:
        return str(error)
    finally:
        adapters.adapters_of = found
    return ""
