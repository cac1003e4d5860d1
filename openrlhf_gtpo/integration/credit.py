"""The estimator that a run uses: its configuration from the arguments, and its advantages of a batch."""

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from openrlhf_gtpo.algorithms import (
    ErrorBudget,
    GRPOSConfig,
    GTPOConfig,
    error_budget,
    grpo_s_advantages,
    grpo_s_shares,
    gtpo_advantages,
    gtpo_shares,
)
from openrlhf_gtpo.integration.errors import UsageError
from openrlhf_gtpo.integration.flags import CONFIGS
from openrlhf_gtpo.token_values import TokenValues


@dataclass(frozen=True)
class EntropyCredit:
    """GTPO or GRPO-S with its settings."""

    name: str
    config: GTPOConfig | GRPOSConfig

    def advantages(
        self,
        entropy: torch.Tensor,
        mask: torch.Tensor,
        outcome: torch.Tensor,
        group_ids: torch.Tensor,
        length_penalty: torch.Tensor | None,
    ) -> torch.Tensor:
        """(B, T) advantages of a whole rollout batch; see ``gtpo_advantages`` and ``grpo_s_advantages``."""
        if isinstance(self.config, GTPOConfig):
            return gtpo_advantages(entropy, mask, outcome, group_ids, self.config, length_penalty)
        return grpo_s_advantages(entropy, mask, outcome, group_ids, self.config, length_penalty)

    def shares(
        self, entropy: torch.Tensor, mask: torch.Tensor, outcome: torch.Tensor, group_ids: torch.Tensor
    ) -> torch.Tensor:
        """(N,) entropy shares: of all action tokens for GTPO, of all responses for GRPO-S."""
        if isinstance(self.config, GTPOConfig):
            positive, negative = gtpo_shares(entropy, mask, outcome, group_ids, self.config)
            return (positive + negative)[mask]
        return grpo_s_shares(entropy, mask, outcome, group_ids, self.config)

    def error_budget(
        self,
        exact: TokenValues,
        rough: TokenValues,
        mask: torch.Tensor,
        outcome: torch.Tensor,
        group_ids: torch.Tensor,
    ) -> ErrorBudget:
        """What ``rough`` does to this credit of a batch; see ``algorithms.error_budget``."""
        return error_budget(
            exact,
            rough,
            mask,
            lambda entropy: self.shares(entropy, mask, outcome, group_ids),
            lambda entropy: self.advantages(entropy, mask, outcome, group_ids, None),
        )


def entropy_credit(args: SimpleNamespace) -> EntropyCredit | None:
    """The entropy-weighted estimator that ``args`` selects, or None where upstream's own estimators do the work.

    Raises:
        UsageError: settings that the paper's rules refuse; the message names the flag.
    """
    estimator = args.algo.advantage.estimator
    if estimator not in CONFIGS:
        return None
    settings = getattr(args.algo, estimator)
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(CONFIGS[estimator])}
    try:
        return EntropyCredit(estimator, CONFIGS[estimator](**values))
    except ValueError as error:
        raise UsageError(f"--algo.{estimator}.*: {error}") from error


def captures_entropy(args: SimpleNamespace) -> bool:
    """Whether the old-policy forward of this run returns entropies."""
    return args.algo.advantage.estimator in CONFIGS or args.logger.entropy_enable
