"""The estimators by name: a new one is a file with its settings and mathematics, and its line in ``ESTIMATORS``."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from . import baselines, grpo_s, gtpo
from .config import check_choice
from .losses import Level
from .rewards import CreditParts


@dataclass(frozen=True)
class Estimator:
    """What a training step asks of an estimator; shapes and errors are those of its functions.

    Fields:
        summary: who is paid, for a command line's help.
        config: a dataclass of settings that checks itself; each field is a flag ``--algo.NAME.FIELD``. It has a
            ``success_threshold``; a ``ratio_mean``, where it has one, is the sequence-level loss's.
        level: of the loss that its advantages go with.
        advantages: of entropy, mask, outcome, group_ids, config and length_penalty; (B, T).
        shares: of entropy, mask, outcome, group_ids and config; (N,), one for each action token or each response.
        parts: of what ``advantages`` takes; what they are made of, (B, T) at token level, (B,) at sequence level. None
            where A = (reward - mean) / std is not all of it.
        formula: of a config and whether a row succeeded; its reward as text, with {outcome} and {share} for a page to
            fill in. Only with ``parts``.
    """

    summary: str
    config: type
    level: Level
    advantages: Callable[..., Tensor]
    shares: Callable[..., Tensor]
    parts: Callable[..., CreditParts] | None = None
    formula: Callable[..., str] | None = None


ESTIMATORS = {
    "gtpo": Estimator(
        "entropy-weighted tokens",
        gtpo.GTPOConfig,
        "token",
        gtpo.gtpo_advantages,
        gtpo.shares_of_tokens,
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
    ),
    "entropy_bonus": Estimator(
        "group_norm with a bonus for entropy",
        baselines.EntropyBonusConfig,
        "token",
        baselines.entropy_bonus_advantages,
        baselines.entropy_bonus_shares,
    ),
}

# The two levels are never mixed: which loss goes with which advantage.
LOSS_LEVEL: dict[str, Level] = {name: estimator.level for name, estimator in ESTIMATORS.items()}


def check_loss_level(estimator: str, level: str) -> None:
    """Raise ValueError if a loss of ``level`` does not belong to the advantages of ``estimator``."""
    check_choice("estimator", estimator, tuple(LOSS_LEVEL))
    check_choice("level", level, get_args(Level))
    if LOSS_LEVEL[estimator] != level:
        raise ValueError(
            f"level={level!r} does not fit estimator={estimator!r}: token and sequence level must not be mixed; "
            f"use level={LOSS_LEVEL[estimator]!r}."
        )
