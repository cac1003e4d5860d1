"""Advantages of a rollout batch, by an estimator of ``algorithms`` or by an upstream one.

Also the other duties of upstream's ``compute_advantages_and_returns``: penalties, returns, ``info``, freeing ``kl``.
"""

from collections.abc import Sequence
from types import SimpleNamespace

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ppo_utils.length_penalty import apply_length_penalties, apply_stop_properly_penalty
from torch import Tensor

from openrlhf_gtpo.algorithms import group_relative_penalty, length_penalty, length_rescaling
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import COMPARE_WITHIN_GROUPS, EntropyCredit
from openrlhf_gtpo.training.credit.rollout_batch import RolloutBatch, in_sampling_order

_COMPARE_WITHIN_BATCH = ("gae", "reinforce", "flash_reinforce")


def shape(
    credit: EntropyCredit,
    batch: RolloutBatch,
    experiences: Sequence[Experience],
    args: Arguments,
    kl_coefficient: float,
) -> None:
    """Set the advantages of ``experiences``, the micro-batches of ``batch``, by ``credit``, and their logged
    values."""
    assert batch.values is not None, "the policy returned no entropies"
    penalty = _length_penalty(batch, experiences, args, batch.succeeded(credit))
    advantages = credit.advantages(batch.values.entropy, batch.mask, batch.outcome, batch.group_ids, penalty)
    if args.reward.clip_range:
        advantages = advantages.clamp(*args.reward.clip_range)

    rewards = (batch.outcome if penalty is None else batch.outcome + penalty).float()
    deviation = rewards.view(-1, args.rollout.n_samples_per_prompt).std(dim=-1)
    deviation = deviation.repeat_interleave(args.rollout.n_samples_per_prompt)
    deviation = deviation.masked_fill(_equal_in_group(rewards, batch), 0)

    by_row = credit.estimator.level == "sequence"
    shaped = batch.scatter(advantages, experiences)
    for experience, values, std in zip(experiences, shaped, batch.split(deviation, experiences), strict=True):
        # The KL in the reward: its sum from each token on; over the whole response where a row has one advantage.
        kl_reward = -max(kl_coefficient, 0.0) * experience.kl.float() * experience.action_mask
        from_here = kl_reward.flip(-1).cumsum(-1).flip(-1)
        values = values + (from_here[:, :1].expand_as(from_here) if by_row else from_here)
        experience.advantages = values * experience.action_mask
        experience.returns = experience.advantages.clone()
        experience.info["group_reward_std"] = std
        tokens = experience.action_mask.sum(dim=-1).clamp_min(1)
        experience.info["return"] = experience.advantages.sum(dim=-1) / tokens
        experience.kl = None


def shape_as_upstream(upstream: RemoteExperienceMaker, batch: RolloutBatch, experiences: list[Experience]) -> None:
    """Set the advantages of ``experiences``, the micro-batches of ``batch``, by an upstream estimator; equal rewards
    get 0.

    Upstream rounds the mean of equal float32 rewards and divides the residue by a std of the same size (openrlhf
    0.11.2, trainer/ppo_utils/experience_maker.py, compute_advantages_and_returns: eight rewards of 0.2 get -10 after
    its clip). Estimators that compare rewards within a group therefore get 0 instead of equal rewards. Other groups
    keep upstream's numbers.
    """
    strategy = upstream.strategy
    args = strategy.args
    for experience in experiences:
        experience.rewards = experience.rewards.to(torch.promote_types(experience.rewards.dtype, torch.float32))
    apply_length_penalties(experiences, args)
    rewards = [experience.rewards for experience in experiences]
    if args.algo.advantage.estimator in COMPARE_WITHIN_GROUPS:
        equal = _equal_in_group(in_sampling_order(torch.cat(rewards), batch.order), batch)
        for experience, zero in zip(experiences, batch.split(equal, experiences), strict=True):
            experience.rewards = experience.rewards.masked_fill(zero, 0)
    penalized = SimpleNamespace(overlong_buffer_len=None, stop_properly_penalty_coef=None)
    reward = SimpleNamespace(**vars(args.reward) | vars(penalized))
    upstream.strategy = SimpleNamespace(args=SimpleNamespace(**vars(args) | {"reward": reward}))
    try:
        upstream.compute_advantages_and_returns(experiences)
    finally:
        upstream.strategy = strategy
    for experience, reward in zip(experiences, rewards, strict=True):
        experience.rewards = reward
        experience.info["reward"] = reward.clone()  # replaces the zeros
    if args.algo.advantage.estimator in _COMPARE_WITHIN_BATCH:  # equal advantages minus their mean are 0
        tokens = torch.cat([e.advantages[e.action_mask.bool()] for e in experiences])
        if (tokens == tokens[:1]).all():
            for experience in experiences:
                experience.advantages.zero_()


def _length_penalty(
    batch: RolloutBatch, experiences: Sequence[Experience], args: Arguments, won: Tensor
) -> Tensor | None:
    """Compute the length penalties (B,) to add to the outcomes, in sampling order (§4.5.1). Logged rewards include
    them. float64, so that rows penalized down to the same reward are equal after the addition.

    The overlong penalty counts action tokens. Upstream's counts the span from the first action to the last (openrlhf
    0.11.2, trainer/ppo_utils/samples_generator.py, _process_response_into_experience).
    """
    reward, lengths = args.reward, batch.mask.sum(dim=-1)
    form, factor = reward.overlong_form, reward.overlong_penalty_factor
    within_group = form in ("group_relative", "group_rescaled")
    if not within_group and reward.overlong_buffer_len is None and reward.stop_properly_penalty_coef is None:
        return None
    rewards = batch.outcome.to(torch.float32, copy=True)
    if form == "group_relative":
        rewards += factor * group_relative_penalty(lengths, won, batch.group_ids)
    elif form == "group_rescaled":
        try:
            rewards += length_rescaling(lengths, batch.outcome, batch.group_ids, alpha=factor)
        except ValueError as error:
            raise TrainingStopped(f"--reward.overlong_form {form}: {error} It changed no weight.") from error
    elif reward.overlong_buffer_len is not None:
        hard = args.rollout.max_new_tokens or args.data.max_len
        soft = hard - reward.overlong_buffer_len
        rewards += factor * length_penalty(lengths, soft, hard, form)  # type: ignore[arg-type]  # the other two forms
    for experience, penalized in zip(experiences, batch.split(rewards, experiences), strict=True):
        experience.rewards = penalized.clone()
    if reward.stop_properly_penalty_coef is not None:
        apply_stop_properly_penalty(experiences, reward.stop_properly_penalty_coef)
    for experience in experiences:
        experience.info["reward"] = experience.rewards.clone()
    penalized = in_sampling_order(torch.cat([e.rewards for e in experiences]), batch.order)
    return penalized.double() - batch.outcome.double()


def _equal_in_group(rewards: Tensor, batch: RolloutBatch) -> Tensor:
    """Return (B,) bool, True in groups whose ``rewards`` (B,), in sampling order, are all equal."""
    groups = rewards.view(int(batch.group_ids.max()) + 1, -1)
    return (groups == groups[:, :1]).all(dim=-1).repeat_interleave(groups.shape[1])
