"""The program that a process runs to train adapters on given rollouts with DeepSpeed or Megatron, without Ray."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.actor_program import (
    log_probs_of,
    make_experience,
    padded_batch,
    policy_class,
    start_actor,
    to_numbers,
)

BATCHES = [[0, 1, 2], [3, 4], [5, 6], [7, 1, 5]]  # of ``actor_program.ROWS``: as many for each of two replicas


def run_steps(
    backend: str, model: str, argv: list[str], steps: int, folder: str | None = None, export: str | None = None
) -> dict[str, Any]:
    """Train for ``steps`` rollouts; return each one's status, what the engines got after them, and the log-probs of
    the policy and of the reference before and after.

    Args:
        folder: of checkpoints, one of which follows the last step.
        export: where the trained model is written.
    """
    import os

    from openrlhf.utils import get_strategy

    from openrlhf_gtpo.training import patch
    from tests.support.rollouts import adapted, arguments

    args = arguments(*argv, "--actor.model_name_or_path", model, "--actor.backend", backend)
    args.actor.num_gpus_per_node = args.ref.num_gpus_per_node = int(os.environ["WORLD_SIZE"])
    args.ckpt.path, args.ckpt.output_dir = folder or args.ckpt.path, export or args.ckpt.output_dir
    args = adapted(args)
    patch.apply(args)
    os.environ["LOCAL_RANK"] = "0"
    strategy = get_strategy(args)
    policy = start_actor(policy_class(backend), int(os.environ["WORLD_SIZE"]))
    policy.init_model_from_pretrained(strategy, model, max_steps=10)
    replicas = strategy.ds_device_mesh["dp"]
    batches = [padded_batch(rows) for rows in BATCHES]
    mine = batches[replicas.get_local_rank() :: replicas.size()]

    def log_probs(method: str) -> list[Any]:
        columns = {name: [getattr(batch, name) for batch in batches] for name in vars(batches[0])}
        return [log_probs_of(result).tolist() for result in policy.execute_batch(method, columns, 0, len(batches))]

    found: dict[str, Any] = {"status": [], "base": log_probs("forward"), "reference": []}
    for _ in range(steps):
        found["reference"].append(log_probs("forward_reference"))
        for batch in mine:
            old = torch.zeros(batch.action_mask.shape)
            policy.append(make_experience(batch, old - 3.0 * batch.action_mask, args))
        found["status"].append(to_numbers(policy.fit(0.1)))
    found["reference"].append(log_probs("forward_reference"))
    found["trained"] = log_probs("forward")
    found["sent"] = sent_by(policy)
    if folder is not None:
        policy.save_checkpoint(f"global_step{steps}", {"global_step": steps})
        if hasattr(policy, "finish_checkpoint"):
            policy.finish_checkpoint()
    if export is not None:
        policy.save_model()
    if backend == "megatron":
        from openrlhf_gtpo.megatron.parallel import groups

        groups.destroy()
    return found


def sent_by(policy: Any) -> dict[str, torch.Tensor]:
    """What an engine would get of the policy, by name; empty on ranks that send nothing."""
    got: dict[str, torch.Tensor] = {}

    def send(weights: Any, *unused: Any) -> None:
        from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, numel, unpack

        for index, bucket in enumerate(weights.buckets):
            buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE)
            weights.fill(index, buffer)
            got.update({name: tensor.clone() for name, tensor in unpack(bucket, buffer)})

    policy.trainer._broadcaster = SimpleNamespace(send=send)
    policy.broadcast_to_vllm()
    return got


def written(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an exported model."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("model*.safetensors") for name, tensor in load_file(path).items()}
