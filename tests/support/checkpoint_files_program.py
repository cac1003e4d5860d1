"""The program that a DeepSpeed actor's process runs in the tests of its checkpoints, without Ray."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.actor_program import policy_class, start_actor


def run(model: str, folder: str, argv: list[str]) -> dict[str, Any]:
    """Save as an earlier version did, successfully, and onto a full disk; return what was there and loaded then."""
    from openrlhf.utils import get_strategy
    from openrlhf.utils.deepspeed import DeepspeedStrategy

    from openrlhf_gtpo.checkpoints.files import HashedFile
    from openrlhf_gtpo.training import patch
    from openrlhf_gtpo.training.actors import strategy as strategy_module
    from tests.support.rollouts import adapted, arguments

    args = arguments(*argv, "--actor.model_name_or_path", model, "--ckpt.path", folder)
    args.actor.num_gpus_per_node = int(os.environ["WORLD_SIZE"])
    args.ckpt.max_num = 1
    args = adapted(args)
    patch.apply(args)
    os.environ["LOCAL_RANK"] = "0"
    strategy = get_strategy(args)
    policy = start_actor(policy_class("deepspeed"), int(os.environ["WORLD_SIZE"]))
    policy.init_model_from_pretrained(strategy, model, max_steps=10)
    engine, actor, first = policy.actor.model, Path(folder, "_actor"), strategy.is_rank_0()

    def there() -> list[str]:
        torch.distributed.barrier()
        names = sorted(path.name for path in actor.iterdir() if path.is_dir())
        torch.distributed.barrier()
        return names

    def load(tag: str | None = None) -> Any:
        try:
            return strategy.load_ckpt(engine, str(actor), tag)[1].get("global_step", "nothing")
        except ValueError as error:
            return str(error)

    def fill_disk(path: str) -> HashedFile:
        return HashedFile("/dev/full")

    found: dict[str, Any] = {}
    # Upstream's own save, as an earlier version made it.
    DeepspeedStrategy.save_ckpt(strategy, engine, str(actor), "global_step1", client_state={"global_step": 1})
    found["earlier version"] = load(), there()

    own = {"global_step": 2} if first else None  # the controller's states go to the first rank
    policy.save_checkpoint("global_step2", own, metric_value=0.9, metric_key="eval")
    found["rotated"] = load(), there()

    with mock.patch.object(strategy_module, "HashedFile", HashedFile if first else fill_disk):
        try:
            policy.save_checkpoint("global_step3", {"global_step": 3})
        except OSError as error:
            found["full"] = type(error).__name__, str(error), there()

    args.ckpt.max_num = 2
    policy.save_checkpoint("global_step3", {"global_step": 3})
    if first:
        largest = max((actor / "global_step3").iterdir(), key=lambda path: path.stat().st_size)
        data = bytearray(largest.read_bytes())
        data[len(data) // 2] ^= 1
        largest.write_bytes(data)
    torch.distributed.barrier()
    found["damaged"] = load("global_step3"), load("global_step9"), load(), there()

    for group in policy.actor_optim.param_groups:
        group["weight_decay"] = 0.25  # of another command line
    states = strategy.load_ckpt(engine, str(actor))[1]
    found["settings"] = [group["weight_decay"] for group in policy.actor_optim.param_groups]
    policy.save_checkpoint("best_global_step2", states)  # after an evaluation that an interruption had cut off
    found["saved again"] = states, load("best_global_step2")
    return found
