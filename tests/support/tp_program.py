"""The program that a process runs to see the weights that tensor-parallel DeepSpeed sends, without Ray or engines."""

import os

import torch


def sent_weights(model: str, argv: list[str]) -> dict[str, torch.Tensor]:
    """The tensors of a trainer's second transfer by name, in the shapes that are announced."""
    from openrlhf.utils import get_strategy

    from openrlhf_gtpo.training import patch
    from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, numel, unpack
    from tests.support.actor_program import policy_class, start_actor
    from tests.support.rollouts import adapted, arguments

    world_size = int(os.environ["WORLD_SIZE"])
    args = arguments(*argv, "--actor.model_name_or_path", model)
    args.actor.num_gpus_per_node = world_size
    args = adapted(args)
    patch.apply(args)
    os.environ["LOCAL_RANK"] = "0"
    policy = start_actor(policy_class("deepspeed"), world_size)
    policy.init_model_from_pretrained(get_strategy(args), model, max_steps=10)
    for _ in range(2):
        weights = policy.trainer._weights_to_send()
        sent: dict[str, torch.Tensor] = {}
        for index, bucket in enumerate(weights.buckets):
            buffer = torch.empty(numel(bucket), dtype=WIRE_DTYPE)
            weights.fill(index, buffer)
            sent |= unpack(bucket, buffer)
    return sent
