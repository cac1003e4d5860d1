"""Replaces upstream's Ray actors with this package's, in the process that starts the run.

Worker processes import upstream afresh, so the actors bring further replacements with them.
"""

from collections.abc import Sequence
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import Feature


def apply(args: Arguments, features: Sequence[Feature] = ()) -> None:
    """Replace the actors under the names through which upstream's ``train`` finds them. Safe to call twice."""
    import ray
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async
    from openrlhf.trainer.ray import vllm_engine
    from openrlhf.utils import deepspeed

    from openrlhf_gtpo.training.actors.dispatch import Groups, engine_bundles
    from openrlhf_gtpo.training.actors.policy_actor import CriticActor, EntropyPolicyActor
    from openrlhf_gtpo.training.actors.strategy import CpuStrategy, Strategy
    from openrlhf_gtpo.training.controller.controller import Controller
    from openrlhf_gtpo.training.rollout.rewards import Patience
    from openrlhf_gtpo.training.rollout.rollout_actor import MAX_CALLS, StrictRolloutActor

    # Parts of features in engines and ranks, and vLLM's arguments.
    on_megatron = args.actor.backend == "megatron"
    max_restarts = args.train.max_restarts
    tensor_parallel_size = args.megatron.tensor_model_parallel_size if on_megatron else args.ds.tensor_parallel_size
    of_engines: dict[str, Any] = {
        "engine_args": {name: getattr(args.vllm, name) for name in ("max_num_seqs", "max_num_batched_tokens")},
        "patience": Patience.of(args),
        "features": [part for feature in features if (part := feature.engine()) is not None],
    }
    for feature in features:
        of_engines["engine_args"] |= feature.engine_args()
    # Ranks: policy, reference and critic, in groups.
    train_ppo_ray.CriticModelActor = CriticActor
    policy: type = EntropyPolicyActor
    if on_megatron:
        from openrlhf_gtpo.training.actors.megatron_actor import MegatronPolicy, MegatronReferenceActor

        policy, train_ppo_ray.ReferenceModelActor = MegatronPolicy, MegatronReferenceActor
    of_policy = {"loss_features": [loss for feature in features if (loss := feature.loss()) is not None]}
    train_ppo_ray.PolicyModelActor = ray.remote(num_gpus=1)(type("PolicyActor", (policy,), of_policy))
    reference = train_ppo_ray.ReferenceModelActor if args.ref.is_actor else None
    train_ppo_ray.RayActorGroup = Groups(train_ppo_ray.PolicyModelActor, reference, tensor_parallel_size)
    # Engines, controller and strategy.
    vllm_engine.get_bundle_indices = engine_bundles
    rollout_actor = type("RolloutActor", (StrictRolloutActor,), of_engines)
    vllm_engine.RolloutRayActor = ray.remote(max_restarts=max_restarts, max_concurrency=MAX_CALLS)(rollout_actor)
    controller = ray.remote(type("RunController", (Controller,), {"features_of_run": features}))
    ppo_trainer.PPOTrainer = ppo_trainer_async.PPOTrainerAsync = controller
    deepspeed.DeepspeedStrategy = CpuStrategy if platform.chosen_platform() == "cpu" else Strategy
