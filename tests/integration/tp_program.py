"""What a process runs to look at the weights that DeepSpeed's tensor parallelism sends, without Ray and engines."""

import os

import torch


def sent_weights(model: str, argv: list[str]) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    """Name to the shape that is announced, and the tensor that follows; of the second transfer of a trainer."""
    from actor_program import _policy_class, _start
    from openrlhf.utils import get_strategy
    from rollouts import arguments

    from openrlhf_gtpo.integration import patch
    from openrlhf_gtpo.integration.command_line import cpu_run

    world_size = int(os.environ["WORLD_SIZE"])
    args = arguments(*argv, "--actor.model_name_or_path", model)
    args.actor.num_gpus_per_node = world_size
    cpu_run.adapt(args)
    patch.apply()
    os.environ["LOCAL_RANK"] = "0"
    policy = _start(_policy_class("deepspeed"), world_size)
    policy.init_model_from_pretrained(get_strategy(args), model, max_steps=10)
    for _ in range(2):
        metas, tensors = policy.trainer._weights_to_send()
        sent = {meta.name: (meta.shape, tensor.clone()) for meta, tensor in zip(metas, tensors, strict=True)}
    return sent
