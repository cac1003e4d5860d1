"""Settings of estimators and surrogates, and their consequences for OpenRLHF's flags. ``algorithms`` declares the
fields (``algorithms.config.setting``)."""

import dataclasses
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Group, Ignored, Need, Values, settings_of

# OpenRLHF's names of the aggregations that divide by the tokens, or by the rows, of the whole optimizer step.
AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean"}

# Settings of surrogates with flags of OpenRLHF: --actor.eps_clip_low_high and --actor.dual_clip.
_UPSTREAM_FLAGS = ("clip_low", "clip_high", "dual_clip")


def _follow_loss_level(values: dict[str, Any], given: frozenset[str]) -> None:
    """Choose a sequence loss for sequence advantages and a token loss for token advantages."""
    estimator, chosen = values["algo.advantage.estimator"], values["actor.loss_agg_mode"]
    level = ESTIMATORS[estimator].level
    if "actor.loss_agg_mode" in given and chosen != AGGREGATION[level]:
        raise UsageError(
            f"--actor.loss_agg_mode {chosen} does not fit --algo.advantage.estimator {estimator}, whose advantages "
            f"are per {level}; leave it out or give {AGGREGATION[level]}."
        )
    if values["actor.policy_loss_type"] != "ppo":
        remedy = "give gspo_token" if level == "token" else "leave it out and give --algo.grpo_s.ratio_mean geometric"
        raise UsageError(
            f"--actor.policy_loss_type gspo does not fit --algo.advantage.estimator {estimator}; for GSPO's ratio "
            f"{remedy}."
        )
    values["actor.loss_agg_mode"] = AGGREGATION[level]


def _follow_surrogate(values: dict[str, Any], given: frozenset[str]) -> None:
    """Take a surrogate's clip range and mean from its paper. A sequence-level surrogate needs one advantage per
    row."""
    name, estimator = values["actor.policy_loss_type"], values["algo.advantage.estimator"]
    kind = SURROGATES[name]
    defaults = {field.name: field.default for field in dataclasses.fields(kind.config)}
    if values["actor.dual_clip"] is not None and "dual_clip" not in defaults:
        raise UsageError(
            f"--actor.dual_clip bounds PPO's clipped objective, which --actor.policy_loss_type {name} does not have; "
            "leave it out."
        )
    if kind.level == "sequence":
        _check_one_advantage_per_row(values, name, estimator)
        if "actor.loss_agg_mode" in given and values["actor.loss_agg_mode"] != AGGREGATION["sequence"]:
            raise UsageError(
                f"--actor.loss_agg_mode {values['actor.loss_agg_mode']} does not fit --actor.policy_loss_type {name}, "
                f"which has one loss term per response; leave it out or give {AGGREGATION['sequence']}."
            )
    if "actor.loss_agg_mode" not in given:
        values["actor.loss_agg_mode"] = AGGREGATION[kind.aggregation]
    if kind.reads and values["actor.entropy_coef"] is None:
        values["actor.entropy_coef"] = 0.0  # makes the training forward return entropies
    if "clip_low" in defaults and "actor.eps_clip_low_high" not in given:
        values["actor.eps_clip_low_high"] = [defaults["clip_low"], defaults["clip_high"]]


def _check_one_advantage_per_row(values: dict[str, Any], name: str, estimator: str) -> None:
    """Refuse credit that differs between the tokens of a response."""
    why, remedy = None, "give gspo_token, or an estimator such as group_norm or grpo_s"
    kind = ESTIMATORS.get(estimator)
    discounts = estimator == "gae" or (estimator == "reinforce" and values["algo.advantage.gamma"] != 1)
    if discounts or (kind and kind.level == "token"):
        why = f"--algo.advantage.estimator {estimator} gives every token its own"
    elif not kind and values["algo.kl.init_coef"] > 0 and not values["algo.kl.use_loss"]:
        why = "the KL in the reward gives every token its own"
        remedy = "give --algo.kl.use_loss or --algo.kl.init_coef 0"
    if why:
        raise UsageError(f"--actor.policy_loss_type {name} needs one advantage per response, but {why}; {remedy}.")


def follow_papers(values: dict[str, Any], given: frozenset[str]) -> None:
    """Fill in the values from the papers of estimator and surrogate."""
    if values["actor.policy_loss_type"] in SURROGATES:
        _follow_surrogate(values, given)
    elif values["algo.advantage.estimator"] in ESTIMATORS:
        _follow_loss_level(values, given)
        if "actor.eps_clip_low_high" not in given:
            values["actor.eps_clip_low_high"] = [0.2, 0.28]
    if values["algo.advantage.estimator"] in ESTIMATORS and "reward.clip_range" not in given:
        values["reward.clip_range"] = None  # OpenRLHF's ±10 is meant for rewards, and would clip shaped advantages


def _is(flag: str, name: str, otherwise: str) -> Need:
    return Need(lambda values: values[flag] == name, f"{otherwise} {{0[{flag}]}}")


def _has_clip_range(values: Values) -> bool:
    surrogate = SURROGATES.get(values["actor.policy_loss_type"])
    return surrogate is None or hasattr(surrogate.config, "clip_low")


_ALL_OF_THEM = Group(
    "all of them",
    f"{', '.join(ESTIMATORS)} clip with 0.2 and 0.28 by default (another --actor.policy_loss_type has its own range), "
    "need --rollout.n_samples_per_prompt >= 2, and clip advantages only if --reward.clip_range is given",
    (),
    ignored=(
        Ignored(
            ("algo.advantage.gamma", "algo.advantage.lambd", "algo.advantage.no_std_norm"),
            Need(
                lambda values: values["algo.advantage.estimator"] not in ESTIMATORS,
                "not read by {0[algo.advantage.estimator]}",
            ),
        ),
        Ignored(
            ("actor.eps_clip", "actor.eps_clip_low_high"),
            Need(_has_clip_range, "{0[actor.policy_loss_type]} has no clip range"),
        ),
        Ignored(
            ("algo.*.ratio_mean",),
            Need(
                lambda values: values["actor.policy_loss_type"] not in SURROGATES,
                "the loss is {0[actor.policy_loss_type]}",
            ),
        ),
    ),
    page="refusals.md#what-works-with-gtpo-and-grpo_s",
)


def algorithm_groups() -> tuple[Group, ...]:
    """Return one group for each estimator and surrogate of the registries, and one for what they share."""
    return (
        *(
            Group(
                name,
                f"{estimator.summary}, with --algo.advantage.estimator {name}",
                settings_of(estimator.config, f"algo.{name}."),
                needs=(_is("algo.advantage.estimator", name, "the estimator is"),),
                page="algorithms.md",
            )
            for name, estimator in ESTIMATORS.items()
        ),
        *(
            Group(
                name,
                f"{surrogate.summary}, with --actor.policy_loss_type {name}",
                settings_of(surrogate.config, f"actor.{name}.", without=_UPSTREAM_FLAGS),
                needs=(_is("actor.policy_loss_type", name, "the loss is"),),
                page="algorithms.md#baselines",
            )
            for name, surrogate in SURROGATES.items()
        ),
        _ALL_OF_THEM,
    )
