"""A run's entropy-weighted estimator: its configuration from the arguments, and its advantages for a batch."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from openrlhf_gtpo.algorithms import ESTIMATORS, ErrorBudget, Estimator, error_budget
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments

# Upstream's estimators that learn only from differences within a group.
COMPARE_WITHIN_GROUPS = ("rloo", "reinforce_baseline", "group_norm", "dr_grpo")


@dataclass(frozen=True)
class EntropyCredit:
    """An estimator of this package, by name, with its settings."""

    name: str
    config: Any

    @property
    def estimator(self) -> Estimator:
        return ESTIMATORS[self.name]

    @property
    def needs_both(self) -> bool:
        """True if a group whose responses all succeed or all fail has no advantage, whatever their rewards."""
        return not getattr(self.config, "shape_uniform_groups", True)

    def advantages(
        self,
        entropy: Tensor,
        mask: Tensor,
        outcome: Tensor,
        group_ids: Tensor,
        length_penalty: Tensor | None,
    ) -> Tensor:
        """Compute (B, T) advantages of a whole rollout batch; see ``gtpo_advantages`` and ``grpo_s_advantages``."""
        return self.estimator.advantages(entropy, mask, outcome, group_ids, self.config, length_penalty)

    def shares(self, entropy: Tensor, mask: Tensor, outcome: Tensor, group_ids: Tensor) -> Tensor:
        """Compute (N,) entropy shares of all action tokens or, for GRPO-S, of all responses; see the estimator."""
        return self.estimator.shares(entropy, mask, outcome, group_ids, self.config)

    def error_budget(
        self,
        exact: TokenValues,
        rough: TokenValues,
        mask: Tensor,
        outcome: Tensor,
        group_ids: Tensor,
    ) -> ErrorBudget:
        """Measure the errors in this credit with ``rough`` values for a batch; see ``algorithms.error_budget``."""
        return error_budget(
            exact,
            rough,
            mask,
            lambda entropy: self.shares(entropy, mask, outcome, group_ids),
            lambda entropy: self.advantages(entropy, mask, outcome, group_ids, None),
        )


def entropy_credit(args: Arguments) -> EntropyCredit | None:
    """Return the entropy-weighted estimator that ``args`` select; None for an upstream estimator.

    Raises:
        UsageError: a setting breaks the paper's rules; the message names the flag.
    """
    name = args.algo.advantage.estimator
    if name not in ESTIMATORS:
        return None
    config = ESTIMATORS[name].config
    values = {field.name: getattr(getattr(args.algo, name), field.name) for field in dataclasses.fields(config)}
    try:
        return EntropyCredit(name, config(**values))
    except ValueError as error:
        raise UsageError(f"--algo.{name}.*: {error}") from error


def captures_entropy(args: Arguments) -> bool:
    """True if the old-policy forward of this run returns entropies."""
    return args.algo.advantage.estimator in ESTIMATORS or args.logger.entropy_enable
