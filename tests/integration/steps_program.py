"""What a process runs to train on given rollouts with DeepSpeed or Megatron, without Ray: the status of each round."""

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from actor_program import _experience, _forward, _log_probs, _numbers, _policy_class, _start

PROMPT = 3


def run_rounds(
    backend: str, model: str, argv: list[str], rounds: list[list[int]], save_after: int = 0
) -> list[dict[str, float]]:
    """The status of each round: lengths of its responses, dealt to the replicas as ``ActorGroup`` does; and, where
    there is a moving average of the weights, its norm. The round ``save_after`` is followed by a checkpoint."""
    from openrlhf.utils import get_strategy
    from rollouts import arguments

    from openrlhf_gtpo.integration import patch
    from openrlhf_gtpo.integration.actors.optimizer_steps import deal_rows
    from openrlhf_gtpo.integration.command_line import host

    args = arguments(*argv, "--actor.model_name_or_path", model, "--actor.backend", backend)
    args.actor.num_gpus_per_node = int(os.environ["WORLD_SIZE"])
    host.adapt(args)
    patch.apply(backend)
    os.environ["LOCAL_RANK"] = "0"
    strategy = get_strategy(args)
    critic = args.algo.advantage.estimator == "gae"
    trained = _start(_critic_class() if critic else _policy_class(backend), int(os.environ["WORLD_SIZE"]))
    trained.init_model_from_pretrained(strategy, model, max_steps=100)
    if backend == "deepspeed":
        from deepspeed.comm import comm

        assert comm.cdb.shm_comm_op is None, "DeepSpeed compiled its all-reduce through shared memory"
    replicas = strategy.ds_device_mesh["dp"]
    found = []
    for number, lengths in enumerate(rounds, start=1):
        order = trained.row_order()
        if order is None or len(lengths) < replicas.size():
            dealt = np.array_split(np.arange(len(lengths)), replicas.size())
        else:
            dealt = deal_rows([PROMPT + length for length in lengths], replicas.size(), order)
        mine = dealt[replicas.get_local_rank()]
        batches = [_row(int(row), lengths[row]) for row in mine]
        old = [_log_probs(result) for result in _forward(trained, batches)] if batches else []
        for row, batch, values in zip(mine, batches, old, strict=True):
            trained.append(_sample(int(row), batch, values, args))
        found.append(_numbers(trained.fit() if critic else trained.fit(0.1)))
        if getattr(trained, "ema_model", None) is not None:
            found[-1]["average"] = float(sum(average.double().square().sum() for average in trained._averages()))
        if number == save_after:
            trained.save_checkpoint(f"global_step{number}")
    if backend == "megatron":
        from openrlhf_gtpo.megatron.parallel import groups

        groups.destroy()
    return found


def _critic_class() -> Any:
    from openrlhf_gtpo.integration.actors.policy_actor import DeepspeedCriticActor

    return DeepspeedCriticActor


def _row(row: int, length: int) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(100 + row)
    tokens = torch.randint(1, 60, (1, PROMPT + length), generator=generator)
    actions = torch.zeros(1, PROMPT + length - 1, dtype=torch.long)
    actions[:, PROMPT - 1 :] = 1
    return SimpleNamespace(sequences=tokens, action_mask=actions, attention_mask=torch.ones_like(tokens))


def _sample(row: int, batch: SimpleNamespace, old: torch.Tensor, args: SimpleNamespace) -> Any:
    """A row whose advantages, and whatever else is drawn, depend on the row alone."""
    experience = _experience(batch, old, args)
    generator = torch.Generator().manual_seed(row)
    level = args.actor.loss_agg_mode
    shape = (1, 1) if level != "token-mean" else batch.action_mask.shape
    experience.advantages = torch.randn(shape, generator=generator).expand(batch.action_mask.shape) * batch.action_mask
    experience.returns = experience.advantages.clone()
    experience.values = torch.randn(batch.action_mask.shape, generator=generator) * batch.action_mask
    return experience
