"""What a reader of a training run looks at first, out of one shaped rollout batch."""

from collections.abc import Sequence

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.algorithms import success
from openrlhf_gtpo.integration.credit.entropy_credit import EntropyCredit
from openrlhf_gtpo.integration.credit.rollout_batch import RolloutBatch
from openrlhf_gtpo.report import names


def of_batch(
    batch: RolloutBatch,
    advantages: Sequence[torch.Tensor],
    experiences: Sequence[Experience],
    credit: EntropyCredit | None,
) -> dict[str, float]:
    """Metrics of a batch whose micro-batches have ``advantages`` (b, t). A mean over no token is left out."""
    threshold = 1.0 if credit is None else credit.config.success_threshold
    succeeded = success(batch.outcome, threshold)
    num_groups = int(batch.group_ids.max()) + 1
    by_group = batch.outcome.float().view(num_groups, -1)
    succeeded_by_group = succeeded.view(num_groups, -1)
    uniform = succeeded_by_group.all(dim=-1) | ~succeeded_by_group.any(dim=-1)
    metrics = {
        names.REWARD_MEAN: by_group.mean().item(),
        names.REWARD_MEAN_AT_G: by_group.mean(dim=-1).mean().item(),
        names.REWARD_BEST_AT_G: by_group.amax(dim=-1).mean().item(),
        names.GROUPS_UNIFORM: float(uniform.sum()),
        names.GROUPS_TOTAL: float(num_groups),
        names.RESPONSE_LENGTH_MEAN: batch.mask.sum(dim=-1).float().mean().item(),
    }
    values = torch.cat([a[e.action_mask.bool()] for a, e in zip(advantages, experiences, strict=True)])
    if values.numel():
        metrics[names.ADVANTAGE_MEAN] = values.mean().item()
        metrics[names.ADVANTAGE_MAX] = values.max().item()
    if batch.entropy is not None:
        metrics |= _entropy_metrics(batch, succeeded, credit)
    return metrics


def _entropy_metrics(batch: RolloutBatch, succeeded: torch.Tensor, credit: EntropyCredit | None) -> dict[str, float]:
    assert batch.entropy is not None
    metrics = {}
    rows = {
        names.ENTROPY_ALL: batch.mask,
        names.ENTROPY_POSITIVE: batch.mask & succeeded.unsqueeze(-1),
        names.ENTROPY_NEGATIVE: batch.mask & ~succeeded.unsqueeze(-1),
    }
    for name, mask in rows.items():
        if mask.any():
            metrics[name] = batch.entropy[mask].mean().item()
    if credit is not None and credit.estimator.level == "token":
        shares = credit.shares(batch.entropy, batch.mask, batch.outcome, batch.group_ids)
        if shares.numel() > 1:
            metrics[names.SHARES_STD] = shares.std().item()
    return metrics
