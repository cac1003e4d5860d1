"""The rules that complete a command line, in their order.

OpenRLHF's own block runs in the middle. A rule before it gets the values by flag and the given flags, and writes
values. A rule after it gets the frozen arguments and returns changed values by flag. No rule writes a value that an
earlier rule has read (a test checks it), so a value never changes after its first use.
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
    """Turn the -1 for never into an infinite number of steps."""
    steps = {"eval.steps": args.eval.steps, "ckpt.save_steps": args.ckpt.save_steps}
    return {flag: math.inf for flag, number in steps.items() if number == -1}


def _follow_host(args: Arguments) -> Mapping[str, Any]:
    """Replace what this host lacks, and print it."""
    return host.without_cuda(args) if platform.chosen_platform() == "cpu" else host.without_kernels(args)


def before() -> dict[Before, str]:
    """Return the rules before OpenRLHF's block in their order, each with the reason for its place."""
    return {
        fill_in_preset: "a preset chooses estimator and loss, which all others depend on",
        fill_in_penalty_and_key: "a preset may choose the penalty's factor",
        refuse_restarts_without_weights: "it writes nothing; restarted engines need weights",
        **{rule: "the first feature decides whether anything is sampled" for kind in FEATURES for rule in kind.before},
        translate_megatron: "OpenRLHF deals batches by DeepSpeed's sizes",
        follow_papers: "estimator and loss are chosen; a preset wins over their papers",
    }


def after() -> dict[After, str]:
    """Return the rules after OpenRLHF's block, likewise."""
    return {
        absolute_paths: "Ray's processes have another folder",
        **{rule: "features look at the whole command line" for kind in FEATURES for rule in kind.after},
        _never: "OpenRLHF's block and ours have checked the numbers",
        _follow_host: "features must see what was asked for, even if this host cannot do it",
    }


def complete(values: dict[str, Any], given: frozenset[str]) -> None:
    """Apply the rules before OpenRLHF's block.

    Args:
        values: a parsed command line by flag, which the rules complete.
        given: destinations that appear on it.

    Raises:
        UsageError: flags that contradict each other.
    """
    for name, value in DERIVED.items():
        values.setdefault(name, value)
    # OpenRLHF uses the one value of eps_clip for both bounds.
    chosen = given | {"actor.eps_clip_low_high"} if "actor.eps_clip" in given else given
    for rule in before():
        rule(values, chosen)


def completed(args: Arguments, given: frozenset[str]) -> Arguments:
    """Return ``args`` after the rules that follow OpenRLHF's block; print which ``given`` flags have no effect.

    Raises:
        UsageError: flags that contradict each other.
    """
    for rule in after():
        args = changed(args, rule(args))
    name_unread(by_flag(args), given)
    return args
