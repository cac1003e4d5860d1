"""The estimators by name. To add one, write its settings and mathematics and list it in ``ESTIMATORS``."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from . import baselines, grpo_s, gtpo
from .losses import Level
from .rewards import CreditParts


@dataclass(frozen=True)
class Estimator:
    """What a training step needs from an estimator. Shapes and errors are documented at its functions.

    Fields:
        summary: what gets the credit, for command-line help.
        config: a dataclass of settings that validates itself; each field is a flag ``--algo.NAME.FIELD``. It has a
            ``success_threshold``. Its ``ratio_mean``, if any, is for the sequence-level loss.
        level: the level of the loss that fits its advantages.
        advantages: takes entropy, mask, outcome, group_ids, config and length_penalty; returns (B, T).
        shares: takes entropy, mask, outcome, group_ids and config; returns (N,), one per action token or per response.
        parts: takes the arguments of ``advantages``; returns what the advantages are computed from, (B, T) at token
            level and (B,) at sequence level. None if the advantages are more than A = (reward - mean) / std.
        formula: takes a config and whether a row succeeded; returns the row's reward as text, with placeholders
            {outcome} and {share} for a page. Only with ``parts``.
        leaves_out: whether tokens without an advantage have no policy loss. A KL reward would give them one.
    """

    summary: str
    config: type
    level: Level
    advantages: Callable[..., Tensor]
    shares: Callable[..., Tensor]
    parts: Callable[..., CreditParts] | None = None
    formula: Callable[..., str] | None = None
    leaves_out: bool = False


ESTIMATORS = {
    "gtpo": Estimator(
        "entropy-weighted tokens",
        gtpo.GTPOConfig,
        "token",
        gtpo.gtpo_advantages,
        gtpo.gtpo_shares,
        gtpo.gtpo_parts,
        gtpo.token_reward_formula,
    ),
    "grpo_s": Estimator(
        "entropy-weighted sequences",
        grpo_s.GRPOSConfig,
        "sequence",
        grpo_s.grpo_s_advantages,
        grpo_s.grpo_s_shares,
        grpo_s.grpo_s_parts,
        grpo_s.sequence_reward_formula,
    ),
    "forking_tokens": Estimator(
        "group_norm at the tokens of highest entropy",
        baselines.ForkingTokensConfig,
        "token",
        baselines.forking_tokens_advantages,
        baselines.forking_tokens_shares,
        leaves_out=True,
    ),
    "entropy_bonus": Estimator(
        "group_norm with a bonus for entropy",
        baselines.EntropyBonusConfig,
        "token",
        baselines.entropy_bonus_advantages,
        baselines.entropy_bonus_shares,
    ),
}
