"""GTPO and GRPO-S (arXiv 2508.04349) and their baselines: entropies and outcomes in, advantages and losses out.

Pure functions of torch tensors. This package must not know where rollouts come from, who trains, or what OpenRLHF is.
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
from .estimators import ESTIMATORS, Estimator
from .groups import success
from .grpo_s import GRPOSConfig, grpo_s_advantages, grpo_s_parts, grpo_s_shares
from .gtpo import GTPOConfig, gtpo_advantages, gtpo_parts, gtpo_shares
from .losses import Surrogate, policy_surrogate
from .rewards import CreditParts, group_relative_penalty, length_penalty, length_rescaling
from .surrogates import SURROGATES, SurrogateType

__all__ = [
    "ESTIMATORS",
    "SURROGATES",
    "CreditParts",
    "EntropyBonusConfig",
    "ErrorBudget",
    "Estimator",
    "ForkingTokensConfig",
    "GRPOSConfig",
    "GTPOConfig",
    "Surrogate",
    "SurrogateType",
    "entropy_advantage_bonus",
    "entropy_bonus_advantages",
    "error_budget",
    "forking_token_mask",
    "forking_tokens_advantages",
    "group_relative_penalty",
    "grpo_advantages",
    "grpo_s_advantages",
    "grpo_s_parts",
    "grpo_s_shares",
    "gtpo_advantages",
    "gtpo_parts",
    "gtpo_shares",
    "length_penalty",
    "length_rescaling",
    "policy_surrogate",
    "success",
]
