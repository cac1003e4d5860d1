"""Where the old policy's log-probs and entropies come from: the actor's forward, or vLLM's sampler, which had the
whole distribution in hand (``--rollout.entropy sampler``).

A run that makes one optimizer step of a rollout needs no old log-probs: the policy that trains is the old one, so the
training forward's own log-probs, detached, are exactly these.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.integration.credit.guide_rows import guide_rows
from openrlhf_gtpo.token_values import TokenValues

if TYPE_CHECKING:  # OpenRLHF takes seconds to import, and a command line that is refused need not wait for it
    from openrlhf.trainer.ppo_utils.experience import Experience

_MAY_MISS = 0.01  # of a rollout's action tokens


def count_steps(total: int, batch_size: int) -> int:
    """Optimizer steps of an epoch over ``total`` rows: as many as whole batches fit, at least one. Rows that are left
    over are spread over them, and too few for a batch make one small step."""
    return max(1, total // batch_size)


def count_all_steps(args: SimpleNamespace, prompts: int) -> int:
    """Optimizer steps of a run over ``prompts`` prompts, by which learning rates are scheduled. Upstream counts the
    batches of all episodes' rows (openrlhf 0.11.2, trainer/ppo_trainer.py, prepare_datasets), which are fewer or more
    where a rollout's rows are no multiple of a batch."""
    whole, rest = divmod(prompts, args.rollout.batch_size)
    samples, batch = args.rollout.n_samples_per_prompt, args.train.batch_size
    steps = whole * count_steps(args.rollout.batch_size * samples, batch)
    steps += count_steps(rest * samples, batch) if rest else 0
    return steps * args.train.max_epochs * args.train.num_episodes


def trains_on_old_log_probs(args: SimpleNamespace, rows: int) -> bool:
    """Whether old log-probs of the actor's forward travel with a rollout of ``rows`` rows: with entropies from it they
    come for nothing; else where several optimizer steps are compared with them, of these rows and of others that join
    them: a guide's rescues, and the rollouts of an actor that waits for its critic."""
    if args.rollout.entropy == "actor" or args.algo.guide.rescue_batch or args.critic.freezing_steps >= 0:
        return True
    steps = count_steps(rows, args.train.batch_size) * args.train.max_epochs
    return steps > 1 and args.rollout.log_probs == "actor"


def always_forwards(args: SimpleNamespace, rows: int) -> bool:
    """Whether the actor's forward is done for every rollout of ``rows`` rows, audit or not."""
    kl_reward = args.algo.kl.init_coef > 0 and not args.algo.kl.use_loss
    return kl_reward or trains_on_old_log_probs(args, rows)


def count_missing(samples: "Sequence[Experience]", sampled: Sequence[TokenValues]) -> int:
    """Action tokens without a value (NaN) of the policy's sampler, such as an agent has written itself; not those of
    the guide, which have none.

    Raises:
        TrainingStopped: there are too many.
    """
    masks = []
    for sample in samples:
        guided, mask = guide_rows(sample), sample.action_mask.bool()
        masks.append(mask if guided is None else mask & ~guided.unsqueeze(-1))
    missing = sum(int((v.entropy.isnan() & mask).sum()) for v, mask in zip(sampled, masks, strict=True))
    actions = sum(int(mask.sum()) for mask in masks)
    if missing > _MAY_MISS * actions:
        raise TrainingStopped(
            f"{missing} of the {actions} tokens to train on ({missing / actions:.1%}, more than {_MAY_MISS:.0%}) have "
            "no entropy from vLLM's sampler, as where an agent edits what was sampled; give --rollout.entropy actor."
        )
    return missing


def fill_missing(sampled: TokenValues, actors: TokenValues) -> TokenValues:
    """The sampler's values (b, t), and the actor's where there are none."""
    return TokenValues(*(torch.where(ours.isnan(), theirs, ours) for ours, theirs in zip(sampled, actors)))
