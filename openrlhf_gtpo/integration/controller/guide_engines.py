"""Starts the engines of the guiding policy (``--algo.guide.*``), to which no weights are sent."""

from types import SimpleNamespace
from typing import Any

import ray
from openrlhf.trainer.ray import vllm_engine

from openrlhf_gtpo.integration.actors.dispatch import engine_bundles
from openrlhf_gtpo.integration.rollout.endpoint import EndpointActor
from openrlhf_gtpo.integration.rollout.rewards import Patience
from openrlhf_gtpo.integration.rollout.rollout_actor import MAX_CALLS, StrictRolloutActor


def start_guide(args: SimpleNamespace, tokenizer: Any, shared: Any) -> list[Any]:
    """Start rollout actors with ``--algo.guide.model_name_or_path``, which may still be loading it when this returns,
    or one that asks ``--algo.guide.endpoint``.

    Args:
        args: the run's arguments.
        tokenizer: shared by the policy and the guide.
        shared: placement group of the trainer's GPUs, on which to put them; None to give them their own GPUs.
    """
    guide, vllm = args.algo.guide, args.vllm
    with_rewards = {"agent_func_path": args.train.agent_func_path, "remote_rm_url": args.reward.remote_url}
    fields: dict[str, Any] = {"patience": Patience.of(args), "with_log_probs": True, "gets_weights": False}
    fields["tokenizer"] = tokenizer
    if guide.endpoint:
        actor = ray.remote(max_concurrency=MAX_CALLS)(type("GuideActor", (EndpointActor,), fields))
        return [actor.options(num_cpus=0).remote(guide.endpoint, guide.model_name_or_path, **with_rewards)]
    fields["engine_args"] = {name: getattr(vllm, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
    # This is the controller's process, in which nobody else makes engines.
    vllm_engine.get_bundle_indices = engine_bundles
    guide_actor = type("GuideActor", (StrictRolloutActor,), fields)
    vllm_engine.RolloutRayActor = ray.remote(max_concurrency=MAX_CALLS)(guide_actor)
    return vllm_engine.create_vllm_engines(
        guide.num_engines,
        guide.tensor_parallel_size,
        guide.model_name_or_path,
        args.train.seed + vllm.num_engines,
        args.train.full_determinism_enable,
        vllm.enable_prefix_caching,
        vllm.enforce_eager,
        args.data.max_len,
        shared,
        guide.gpu_memory_utilization,
        vllm.enable_sleep,
        "processed_logprobs",
        **with_rewards,
    )
