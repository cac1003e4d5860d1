"""GTPO and GRPO-S (arXiv 2508.04349) and their baselines: entropies and outcomes in, advantages and losses out.

Pure functions of torch tensors. This package must not know where rollouts come from, who trains, or about OpenRLHF.
"""

from .baselines import (
    EntropyBonusConfig,
    ForkingTokensConfig,
    entropy_advantage_bonus,
    entropy_bonus_advantages,
    forking_token_mask,
    forking_tokens_advantages,
    grpo_advantages,
)
from .error_budget import ErrorBudget, error_budget
from .estimators import ESTIMATORS, LOSS_LEVEL, Estimator, check_loss_level
from .groups import success
from .grpo_s import GRPOSConfig, grpo_s_advantages, grpo_s_rewards, grpo_s_shares, sequence_entropy
from .gtpo import GTPOConfig, gtpo_advantages, gtpo_rewards, gtpo_shares
from .losses import (
    PolicyLossOutput,
    Surrogate,
    policy_loss,
    policy_surrogate,
    sequence_ratio,
)
from .rewards import CreditParts, ShapedRewards, length_penalty
from .surrogates import SURROGATES, SurrogateType

__all__ = [
    "ESTIMATORS",
    "LOSS_LEVEL",
    "SURROGATES",
    "CreditParts",
    "EntropyBonusConfig",
    "ErrorBudget",
    "Estimator",
    "ForkingTokensConfig",
    "GRPOSConfig",
    "GTPOConfig",
    "PolicyLossOutput",
    "ShapedRewards",
    "Surrogate",
    "SurrogateType",
    "check_loss_level",
    "entropy_advantage_bonus",
    "entropy_bonus_advantages",
    "error_budget",
    "forking_token_mask",
    "forking_tokens_advantages",
    "grpo_advantages",
    "grpo_s_advantages",
    "grpo_s_rewards",
    "grpo_s_shares",
    "gtpo_advantages",
    "gtpo_rewards",
    "gtpo_shares",
    "length_penalty",
    "policy_loss",
    "policy_surrogate",
    "sequence_entropy",
    "sequence_ratio",
    "success",
]
