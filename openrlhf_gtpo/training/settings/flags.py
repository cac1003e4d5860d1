"""The flags that this package adds to OpenRLHF's command line: all settings, in one list."""

import argparse
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.training.features import FEATURES
from openrlhf_gtpo.training.host import CPU_TOKENS
from openrlhf_gtpo.training.settings.algorithms import algorithm_groups
from openrlhf_gtpo.training.settings.megatron_flags import MEGATRON
from openrlhf_gtpo.training.settings.presets import PRESET
from openrlhf_gtpo.training.settings.prompts import PROMPTS
from openrlhf_gtpo.training.settings.run import RUN
from openrlhf_gtpo.training.settings.setting import Group, Need, Setting, Values
from openrlhf_gtpo.training.settings.supervision import SUPERVISION

# Values that the core needs but no flag of its own gives. A feature sets them by a flag or a rule.
DERIVED: Values = {
    "rollout.is_sampled": True,  # engines sample the rows from prompts; otherwise a feature's sampler has the rows
    "rollout.entropy": "actor",  # source of the old policy's entropies
    "rollout.log_probs": "actor",  # source of old log-probs for several optimizer steps of a rollout
    "rollout.joined_by": None,  # the flag that lets other rows join a rollout's training
    "rollout.forward_for": None,  # why entropies must come from the actor's forward, as a clause
    "actor.lora": None,  # adapters that are trained instead of all weights: ``LoraOptions``
    "ref.is_actor": False,  # whether the reference is the actor with its adapters off
    "train.shares_prompts": False,  # whether a group's prompt is computed once; ``checks.shared_prompts`` decides
    "rollout.replays_routes": False,  # whether rows bring their tokens' experts for the policy's routers
    "logger.started": 0.0,  # when the driver began to start the run, in seconds since 1970
    "vllm.others": (),  # engines besides the policy's: ``host.EngineGroup``s
}


def setting_groups() -> tuple[Group, ...]:
    """Return all groups of settings, in the order of --help."""
    return (
        PRESET,
        RUN,
        PROMPTS,
        SUPERVISION,
        *(feature.settings for feature in FEATURES),
        MEGATRON,
        *algorithm_groups(),
    )


def all_settings() -> Iterator[Setting]:
    """Yield the settings of all groups."""
    for group in setting_groups():
        yield from group.settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this package's flags, and its estimators and surrogates to the choices of OpenRLHF's flags."""
    estimator = parser._option_string_actions["--algo.advantage.estimator"]
    assert estimator.choices is not None
    estimator.choices = [*estimator.choices, *ESTIMATORS]
    estimators = (f"{name} ({kind.summary})" for name, kind in ESTIMATORS.items())
    estimator.help = f"{estimator.help}; {', '.join(estimators)}"
    clip_range = parser._option_string_actions["--reward.clip_range"]
    clip_range.help = f"{clip_range.help}; {', '.join(ESTIMATORS)} clip advantages with it, only if it is given"
    loss_type = parser._option_string_actions["--actor.policy_loss_type"]
    assert loss_type.choices is not None
    loss_type.choices = [*loss_type.choices, *SURROGATES]
    surrogates = ", ".join(f"{name} ({kind.summary})" for name, kind in SURROGATES.items())
    loss_type.help = f"policy loss: OpenRLHF's ppo and gspo; {surrogates}"
    for name, use in (("train", "trained on"), ("rollout", "computed at once before training")):
        tokens = parser._option_string_actions[f"--{name}.max_tokens_per_gpu"]
        tokens.help = (
            f"maximum tokens {use} at once on a GPU, with the Megatron backend or --train.dynamic_batch_enable; fewer "
            f"take less memory{f' ({CPU_TOKENS} for Megatron on a CPU)' if name == 'train' else ''}"
        )
    for group in setting_groups():
        if group.settings:
            group.add_to(parser)


def check_ranges(values: Values) -> None:
    """Raise UsageError for the first setting of this package that is out of range."""
    for setting in all_settings():
        if setting.bounds is not None:
            setting.bounds.check(setting.flag, values[setting.flag])


def name_unread(values: dict[str, Any], given: frozenset[str]) -> None:
    """Print one line with the ``given`` flags that a run with these ``values`` by flag does not read."""
    unread: dict[str, list[str]] = {}  # by reason
    for flag in sorted(given):
        lacking = next((need for need in _needs(flag) if not need.holds(values)), None)
        if lacking is not None:
            unread.setdefault(lacking.otherwise.format(values), []).append(f"--{flag}")
    if unread:
        reasons = "; ".join(f"{', '.join(flags)} ({reason})" for reason, flags in unread.items())
        print(f"These flags were given but have no effect here: {reasons}.", file=sys.stderr)


def _needs(flag: str) -> Iterator[Need]:
    """Yield the conditions for a run to read ``flag``, which may be OpenRLHF's."""
    for group in setting_groups():
        yield from (rule.need for rule in group.ignored if any(fnmatchcase(flag, name) for name in rule.flags))
    for group in setting_groups():
        for setting in group.settings:
            if setting.flag == flag:
                yield from (*group.needs, *setting.needs)
