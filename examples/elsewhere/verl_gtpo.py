"""GTPO in verl: an advantage estimator "gtpo", and a mixin that passes the old policy's entropies to it.

    pip install verl==0.9.1 .      # in a clone of this project

verl computes these entropies with the old log-probs but drops them before it computes advantages. Derive the trainer
from the mixin, and import this module where the trainer runs::

    class Trainer(KeepsEntropies, RayPPOTrainer): ...

with ``trainer.use_v1=False algorithm.adv_estimator=gtpo actor_rollout_ref.actor.loss_agg_mode=token-mean
actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28``. Leave
``algorithm.use_kl_in_reward`` off, because success is decided by the rewards that arrive here.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import register_adv_est

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages

NAME, KEPT = "gtpo", "gtpo_entropys"
CREDIT = GTPOConfig()


@register_adv_est(NAME)
def compute_gtpo_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: np.ndarray,
    config: Any = None,
    entropys: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute GTPO's advantages, with verl's interface.

    Args:
        token_level_rewards: (B, T); the sum over a row is its outcome.
        response_mask: (B, T), 1 at the tokens that the policy sampled.
        index: (B,) the prompt's uid of each row; rows of a group need not be adjacent.
        entropys: (B, T) nats, under the policy that sampled the rows.

    Returns:
        Advantages and returns, (B, T) each, equal here.

    Raises:
        ValueError: the entropies are missing.
    """
    if entropys is None:
        raise ValueError("GTPO needs the old policy's entropies; derive the trainer from KeepsEntropies.")
    group_ids = torch.as_tensor(np.unique(index, return_inverse=True)[1]).flatten()
    outcome = token_level_rewards.sum(dim=-1)
    advantages = gtpo_advantages(entropys, response_mask.bool(), outcome, group_ids, CREDIT)
    return advantages, advantages


class KeepsEntropies:
    """Mixin that passes entropies to the estimator. Put it before ``RayPPOTrainer`` among a trainer's bases."""

    def fit(self) -> Any:
        """Train with a ``compute_advantage`` in the trainer's module that passes entropies on."""
        from verl.trainer.ppo import ray_trainer

        plain = ray_trainer.compute_advantage
        ray_trainer.compute_advantage = with_entropies(plain)
        try:
            return super().fit()  # type: ignore[misc]
        finally:
            ray_trainer.compute_advantage = plain

    def _compute_old_log_prob(self, batch: Any) -> Any:
        old_log_prob, utilization = super()._compute_old_log_prob(batch)  # type: ignore[misc]
        old_log_prob.batch[KEPT] = old_log_prob.batch["entropys"]  # verl drops its own copy
        return old_log_prob, utilization


def with_entropies(compute_advantage: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap verl's ``compute_advantage`` so that this estimator, but no other, gets the rows' entropies."""

    @functools.wraps(compute_advantage)
    def passing(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
        if adv_estimator != NAME:
            return compute_advantage(data, adv_estimator, *args, **kwargs)
        rewards, mask = data.batch["token_level_rewards"], data.batch["response_mask"]
        index, entropys = data.non_tensor_batch["uid"], data.batch.get(KEPT, None)
        data.batch["advantages"], data.batch["returns"] = compute_gtpo_advantage(
            rewards, mask, index, kwargs.get("config"), entropys
        )
        return data

    return passing
