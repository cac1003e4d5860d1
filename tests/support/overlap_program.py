"""The functions that ranks run in the tests of overlapped communication: steps, and what reads weights after them."""

from pathlib import Path
from typing import Any

import torch

from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from tests.support.checkpoint_program import MICRO_BATCHES
from tests.support.families import ragged_rows
from tests.support.fp8_program import load
from tests.support.logits_program import all_actions, on

ROWS = ragged_rows(151, [9, 4, 7], seed=99)


def with_and_without(
    source: str, layout: Layout, fp8: Fp8Options | None, folder: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What every reader finds with gradients and weights exchanged while the passes run, and with no such overlap."""
    with on(layout):
        overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
        overlap |= {"bucket_size": 5000}  # every matrix a bucket of its own
        alone = {"overlap_grad_reduce": False, "overlap_param_gather": False}
        results = []
        for name, ddp in (("overlap", overlap), ("alone", alone)):
            model = load(source, layout, fp8, "bfloat16" if fp8 else "float32")
            # Clipping scales by the norm of all gradients, whose last bit depends on the buffers that hold them.
            trainer = Trainer(model, OptimizerOptions(lr=5e-3, max_norm=0.0, ddp=ddp))
            results.append(_train_and_read(trainer, Path(folder) / name))
        torch.distributed.barrier()  # no rank closes its connections while another still works with it
        return results[0], results[1]


def _train_and_read(trainer: Trainer, folder: Path) -> dict[str, Any]:
    from megatron.core import parallel_state

    mine, replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    model, stage = trainer.model, trainer.model.stage

    def step(seed: int, micro_batches: int, another_follows: bool) -> None:
        rows = [ragged_rows(151, lengths, seed=seed + i) for i, lengths in enumerate(MICRO_BATCHES[:micro_batches])]
        batches = [all_actions(part) for part in rows[mine::replicas]]
        trainer.step(batches, lambda i, log_probs, _: (-log_probs.sum() / 100, None), another_follows=another_follows)

    def own(parameters: Any) -> dict[str, torch.Tensor]:
        return {name: parameter.detach().float().clone() for name, parameter in parameters}

    def engines() -> dict[str, torch.Tensor]:
        return own(FullWeights(model, 2**16).tensors())

    def one_replica_scores() -> dict[str, torch.Tensor]:
        group = model.config.expert_model_parallel_size  # replicas that share experts work together
        return _scores(model) if mine < group else {}

    def offloaded() -> dict[str, torch.Tensor]:
        offload = Offload(trainer)
        offload.optimizer()
        offload.parameters()
        offload.restore()
        return _scores(model)

    def saved() -> dict[str, torch.Tensor]:
        Checkpoints(folder).save("now", trainer, {})
        Checkpoints(folder).load(trainer)
        return own(stage.named_parameters())

    def exact() -> dict[str, torch.Tensor]:
        return own((name, trainer.exact_weight(parameter)) for name, parameter in stage.named_parameters())

    found = {"at first": one_replica_scores()}
    step(10, 3, another_follows=True)  # one replica has two micro-batches, the other has one
    found["between"] = own(stage.named_parameters())
    step(20, 1, another_follows=False)  # here the other replica has none
    found["scores"] = one_replica_scores()
    step(30, 3, another_follows=True)
    step(40, 3, another_follows=False)
    # Only the last of these runs a forward pass, which could gather what has not been gathered yet.
    found |= {"engines": engines(), "exact": exact(), "saved": saved()}
    return found | {"offloaded": offloaded()}


def _scores(model: Any) -> dict[str, torch.Tensor]:
    (scores,) = schedule.forward(model, [all_actions(ROWS)])
    return {"log_probs": scores.log_probs, "entropy": scores.entropy}
