"""Whole algorithms built from OpenRLHF's parts (``--algo.preset``). For where they depart from their papers, see
docs/algorithms.md."""

from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Group, Setting

# A flag on the command line wins over its preset's value.
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: KL loss with the k3 estimator; every response weighs the same.
    "grpo": {
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "algo.kl.init_coef": 0.04,
    },
    # arXiv 2503.14476: clip-higher, dynamic sampling, token-level loss, overlong penalty, no KL. Rewards are -1 and 1;
    # a group of 0 and 1 with half the penalty has the same advantages.
    "dapo": {
        "algo.advantage.estimator": "group_norm",
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.loss_agg_mode": "token-mean",
        "algo.dynamic_filtering_enable": True,
        "algo.kl.init_coef": 0.0,
        "reward.overlong_penalty_factor": 0.5,
    },
    # arXiv 2507.18071: sequence-level ratio with its narrow clip range, no KL.
    "gspo": {
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "gspo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.eps_clip_low_high": [3e-4, 4e-4],
        "algo.kl.init_coef": 0.0,
    },
    # Each surrogate with what it takes from its paper, on GRPO's advantages.
    **{
        name: {"algo.advantage.estimator": "group_norm", "actor.policy_loss_type": name, "algo.kl.init_coef": 0.0}
        for name in SURROGATES
    },
}
# arXiv 2506.01939: built on DAPO.
PRESETS["forking_tokens"] = PRESETS["dapo"] | {"algo.advantage.estimator": "forking_tokens"}

# DAPO's buffer as a share of the longest response (4096 of 20480 tokens).
_DAPO_BUFFER_SHARE = 0.2


def fill_in_preset(values: dict[str, Any], given: frozenset[str]) -> None:
    """Fill in the preset's values, and the length of its overlong penalty."""
    preset = values["algo.preset"]
    if preset is None:
        return
    if "algo.advantage.estimator" in given:
        raise UsageError(
            f"--algo.preset {preset} brings its own estimator; drop --algo.advantage.estimator or the preset."
        )
    values.update({flag: value for flag, value in PRESETS[preset].items() if flag not in given})
    if "reward.overlong_penalty_factor" in PRESETS[preset] and "reward.overlong_buffer_len" not in given:
        longest = values["rollout.max_new_tokens"]
        if not longest:
            # OpenRLHF's penalty then counts back from --data.max_len; our estimators' does not.
            instead = ", or --reward.overlong_buffer_len to count back from --data.max_len"
            raise UsageError(
                f"--algo.preset {preset} penalizes responses that come close to --rollout.max_new_tokens, which is "
                f"missing; give it{'' if values['algo.advantage.estimator'] in ESTIMATORS else instead}."
            )
        values["reward.overlong_buffer_len"] = float(max(1, int(longest * _DAPO_BUFFER_SHARE)))


PRESET = Group(
    "presets",
    "whole algorithms",
    (
        Setting(
            "algo.preset",
            None,
            "select a whole algorithm: estimator, loss, clip range, KL, filtering and length penalty. Flags given "
            "with it win. dapo and forking_tokens need --rollout.max_new_tokens and rewards of 0 and 1",
            choices=tuple(sorted(PRESETS)),
        ),
    ),
    page="algorithms.md#departures",
)
