"""What follows from a command line for the arguments that it does not give: all rules, in their order.

OpenRLHF's own block completes the command line in the middle. A rule before it has the values by flag and the flags
that were given, and writes values; a rule after it has the frozen arguments, and returns other values by flag. No rule
writes what an earlier one has read (a test holds it), so that a value can be trusted once somebody has read it.
"""

import math
from collections.abc import Mapping
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.training import host
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.features import FEATURES
from openrlhf_gtpo.training.settings.algorithms import follow_papers
from openrlhf_gtpo.training.settings.flags import DERIVED, name_unread
from openrlhf_gtpo.training.settings.frozen import by_flag, changed
from openrlhf_gtpo.training.settings.megatron_flags import translate_megatron
from openrlhf_gtpo.training.settings.presets import fill_in_preset
from openrlhf_gtpo.training.settings.run import fill_in_penalty_and_key
from openrlhf_gtpo.training.settings.setting import After, Before
from openrlhf_gtpo.training.settings.supervision import refuse_restarts_without_weights
from openrlhf_gtpo.training.settings.values import absolute_paths


def _never(args: Arguments) -> Mapping[str, Any]:
    """-1, which is no number of steps, becomes infinity."""
    steps = {"eval.steps": args.eval.steps, "ckpt.save_steps": args.ckpt.save_steps}
    return {flag: math.inf for flag, number in steps.items() if number == -1}


def _follow_host(args: Arguments) -> Mapping[str, Any]:
    """What this host lacks is replaced, and said."""
    return host.without_cuda(args) if platform.chosen_platform() == "cpu" else host.without_kernels(args)


def before() -> dict[Before, str]:
    """The rules before OpenRLHF's block in their order, each with why it stands there."""
    return {
        fill_in_preset: "a preset chooses estimator and loss, which all others follow",
        fill_in_penalty_and_key: "a preset may choose the penalty's factor",
        refuse_restarts_without_weights: "nothing is written: what is restarted has to get weights",
        **{rule: "the first feature says whether anything is sampled" for kind in FEATURES for rule in kind.before},
        translate_megatron: "OpenRLHF deals batches by DeepSpeed's sizes",
        follow_papers: "estimator and loss are chosen, and a preset wins over their papers",
    }


def after() -> dict[After, str]:
    """The rules after it, likewise."""
    return {
        absolute_paths: "Ray's processes have another folder",
        **{rule: "features look at the whole command line" for kind in FEATURES for rule in kind.after},
        _never: "OpenRLHF's block and ours have checked the numbers",
        _follow_host: "what was asked for is known, also where this host cannot do it",
    }


def complete(values: dict[str, Any], given: frozenset[str]) -> None:
    """Apply the rules before OpenRLHF's block.

    Args:
        values: a parsed command line by flag, which is completed.
        given: destinations that appear on it.

    Raises:
        UsageError: flags that contradict each other.
    """
    for name, value in DERIVED.items():
        values.setdefault(name, value)
    # OpenRLHF takes the one value of eps_clip for both bounds.
    chosen = given | {"actor.eps_clip_low_high"} if "actor.eps_clip" in given else given
    for rule in before():
        rule(values, chosen)


def completed(args: Arguments, given: frozenset[str]) -> Arguments:
    """``args`` after the rules that follow OpenRLHF's block. Of the flags that were ``given``, those that have no
    effect now that all values are known are named.

    Raises:
        UsageError: flags that contradict each other.
    """
    for rule in after():
        args = changed(args, rule(args))
    name_unread(by_flag(args), given)
    return args
