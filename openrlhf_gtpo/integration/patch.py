"""Puts this package's Ray actors in the place of upstream's, in the process that starts the run.

The actors themselves bring what they need into their worker processes, which import upstream afresh.
"""

from functools import partial
from typing import Any

from openrlhf_gtpo import platform


def apply(
    backend: str = "deepspeed",
    tensor_parallel_size: int = 1,
    engine_args: dict[str, Any] | None = None,
    max_restarts: int = 0,
    stall_timeout: float = 0.0,
    with_entropy: bool = False,
    temperature: float = 1.0,
) -> None:
    """Replace the names through which upstream's ``train`` finds its actors. Safe to call twice.

    Args:
        backend: what holds the policy and the reference model, as ``--actor.backend``.
        tensor_parallel_size: of their models.
        engine_args: of every vLLM engine, beside those that upstream gives it.
        max_restarts, stall_timeout: as ``--train.*``.
        with_entropy, temperature: whether engines return entropies with what they sample for training, and at which
            temperature.
    """
    import ray
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.utils import deepspeed

    from openrlhf_gtpo.integration.actors.dispatch import ActorGroup, engine_bundles
    from openrlhf_gtpo.integration.actors.policy_actor import CriticActor, PolicyActor
    from openrlhf_gtpo.integration.actors.strategy import CpuStrategy, Strategy
    from openrlhf_gtpo.integration.controller.trainer import Trainer
    from openrlhf_gtpo.integration.rollout.rewards import TRIES, Patience
    from openrlhf_gtpo.integration.rollout.rollout_actor import StrictRolloutActor

    train_ppo_ray.RayActorGroup = partial(ActorGroup, tensor_parallel_size=tensor_parallel_size)
    train_ppo_ray.CriticModelActor = CriticActor
    train_ppo_ray.PolicyModelActor = PolicyActor
    if backend == "megatron":
        from openrlhf_gtpo.integration.actors.megatron_actor import MegatronPolicyActor, MegatronReferenceActor

        train_ppo_ray.PolicyModelActor = MegatronPolicyActor
        train_ppo_ray.ReferenceModelActor = MegatronReferenceActor
    vllm_engine.get_bundle_indices = engine_bundles
    patience = Patience(TRIES if max_restarts else 1, stall_timeout)
    fields: dict[str, Any] = {"engine_args": engine_args or {}, "patience": patience}
    fields |= {"with_entropy": with_entropy, "temperature": temperature}
    rollout_actor = type("RolloutActor", (StrictRolloutActor,), fields)
    vllm_engine.RolloutRayActor = ray.remote(max_restarts=max_restarts)(rollout_actor)
    ppo_trainer.PPOTrainer = Trainer
    deepspeed.DeepspeedStrategy = CpuStrategy if platform.chosen_platform() == "cpu" else Strategy
