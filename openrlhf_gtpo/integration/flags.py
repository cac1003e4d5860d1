"""The flags that this package adds to OpenRLHF's command line, and the defaults that an algorithm brings with it."""

import argparse
import dataclasses
import inspect
import re
import typing
from typing import Any

from openrlhf_gtpo.algorithms import LOSS_LEVEL, GRPOSConfig, GTPOConfig
from openrlhf_gtpo.integration import megatron_flags
from openrlhf_gtpo.integration.errors import UsageError

CONFIGS: dict[str, type] = {"gtpo": GTPOConfig, "grpo_s": GRPOSConfig}

# OpenRLHF's name of the aggregation that divides by tokens, or by rows, of the whole optimizer step.
AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean"}

# Whole algorithms from OpenRLHF's parts. A flag given on the command line wins over its preset's value.
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300: KL loss with the k3 estimator, every response weighs the same.
    "grpo": {
        "algo.advantage.estimator": "group_norm",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "algo.kl.use_loss": True,
        "algo.kl.estimator": "k3",
        "algo.kl.init_coef": 0.04,
    },
    # arXiv 2503.14476: clip-higher, dynamic sampling, token-level loss, overlong penalty, no KL.
    "dapo": {
        "algo.advantage.estimator": "group_norm",
        "actor.eps_clip_low_high": [0.2, 0.28],
        "actor.loss_agg_mode": "token-mean",
        "algo.dynamic_filtering_enable": True,
        "algo.kl.init_coef": 0.0,
    },
    # arXiv 2507.18071: sequence-level ratio with its narrow clip range, no KL.
    "gspo": {
        "algo.advantage.estimator": "group_norm",
        "actor.policy_loss_type": "gspo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        "actor.eps_clip_low_high": [3e-4, 4e-4],
        "algo.kl.init_coef": 0.0,
    },
}

# What --vllm.sync_checksum cannot vouch for.
_NOT_PROVEN = {
    "vllm.sync_with_ray": "whose transfer is OpenRLHF's own",
    "actor.freeze_visual_encoder": "with which only a part of the model is sent",
}

# DAPO's buffer as a share of the longest response (4096 of 20480 tokens).
_DAPO_BUFFER_SHARE = 0.2


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this package's flags, and its estimators to the choices of ``--algo.advantage.estimator``."""
    estimator = parser._option_string_actions["--algo.advantage.estimator"]
    assert estimator.choices is not None
    estimator.choices = [*estimator.choices, *CONFIGS]
    estimator.help = f"{estimator.help}; gtpo (entropy-weighted tokens), grpo_s (entropy-weighted sequences)"

    group = parser.add_argument_group("openrlhf_gtpo")
    group.add_argument(
        "--algo.preset",
        choices=sorted(PRESETS),
        default=None,
        help="select a whole algorithm: its estimator, loss, clip range, KL, filtering and length penalty; "
        "flags given beside it win",
    )
    group.add_argument(
        "--reward.overlong_form",
        choices=["continuous", "as_printed"],
        default="continuous",
        help="shape of the overlong penalty for gtpo and grpo_s: DAPO's continuous one, or the paper's as printed",
    )
    group.add_argument(
        "--eval.before_training",
        action="store_true",
        default=False,
        help="evaluate --eval.dataset once before the first step",
    )
    group.add_argument(
        "--ckpt.stop_file",
        default=None,
        help="when this file appears, save a checkpoint after the step in progress and exit with status 75 (default: "
        "'stop' in --ckpt.path, where one that is left from an earlier run does not count)",
    )
    group.add_argument(
        "--logger.metrics_path", default=None, help="append every step's metrics to this JSON-lines file"
    )
    group.add_argument(
        "--logger.entropy_enable",
        action="store_true",
        default=False,
        help="log policy entropies with the other estimators too (gtpo and grpo_s always do)",
    )
    group.add_argument(
        "--vllm.sync_bucket_mb", type=int, default=256, help="size of one bucket of the weight transfer, in MiB"
    )
    group.add_argument(
        "--vllm.sync_checksum",
        action="store_true",
        default=False,
        help="prove after every weight transfer that each parameter reached every engine; stop the run where one did not",
    )
    for name, config in CONFIGS.items():
        _add_config_flags(parser.add_argument_group(f"openrlhf_gtpo {name}"), f"--algo.{name}.", config)
    megatron_flags.add_flags(parser)


def _add_config_flags(group: argparse._ArgumentGroup, prefix: str, config: type) -> None:
    types = typing.get_type_hints(config)
    # GRPOSConfig refers to GTPOConfig for what the two share.
    shared = field_descriptions(GTPOConfig)
    descriptions = {
        name: shared[name] if text.startswith("as in ") else text for name, text in field_descriptions(config).items()
    }
    for field in dataclasses.fields(config):
        kind = types[field.name]
        options: dict[str, Any] = {"default": field.default, "help": descriptions.get(field.name)}
        if typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
        group.add_argument(prefix + field.name, **options)


def field_descriptions(config: type) -> dict[str, str]:
    """Field name -> its description under ``Fields:`` in the docstring of a configuration class."""
    documented = inspect.cleandoc(config.__doc__ or "").partition("Fields:\n")[2].partition("\n\n")[0]
    descriptions: dict[str, str] = {}
    for names, text in re.findall(r"^    (\w[\w, ]*): (.*(?:\n        .*)*)", documented, re.MULTILINE):
        for name in names.split(", "):
            descriptions[name] = " ".join(text.replace("``", "").replace("%", "%%").split())
    return descriptions


def adjust(args: argparse.Namespace, given: frozenset[str]) -> None:
    """Fill in what the chosen preset or estimator implies, for destinations not in ``given``.

    Raises:
        UsageError: a flag that contradicts the preset, the estimator's loss level or the actor's backend.
    """
    bucket = getattr(args, "vllm.sync_bucket_mb")
    if bucket < 1:
        raise UsageError(f"--vllm.sync_bucket_mb {bucket} leaves no room for a weight; give at least 1.")
    if getattr(args, "vllm.sync_checksum"):
        for flag, why in _NOT_PROVEN.items():
            if getattr(args, flag):
                raise UsageError(f"--vllm.sync_checksum does not go with --{flag}, {why}; leave one of them out.")
    preset = getattr(args, "algo.preset")
    if preset is not None:
        if "algo.advantage.estimator" in given:
            raise UsageError(
                f"--algo.preset {preset} brings its own estimator; drop --algo.advantage.estimator or the preset."
            )
        for destination, value in PRESETS[preset].items():
            if destination not in given:
                setattr(args, destination, value)
        if preset == "dapo" and "reward.overlong_buffer_len" not in given:
            longest = getattr(args, "rollout.max_new_tokens") or getattr(args, "data.max_len")
            setattr(args, "reward.overlong_buffer_len", float(max(1, int(longest * _DAPO_BUFFER_SHARE))))

    estimator = getattr(args, "algo.advantage.estimator")
    if estimator in CONFIGS:
        _follow_loss_level(args, given, estimator)
        if not given & {"actor.eps_clip", "actor.eps_clip_low_high"}:
            setattr(args, "actor.eps_clip_low_high", [0.2, 0.28])
    megatron_flags.adjust(args, given)


def _follow_loss_level(args: argparse.Namespace, given: frozenset[str], estimator: str) -> None:
    """Sequence advantages go with a sequence loss, token advantages with a token loss (SPEC §5)."""
    aggregation = AGGREGATION[LOSS_LEVEL[estimator]]
    chosen = getattr(args, "actor.loss_agg_mode")
    if "actor.loss_agg_mode" in given and chosen != aggregation:
        raise UsageError(
            f"--actor.loss_agg_mode {chosen} does not fit --algo.advantage.estimator {estimator}, whose advantages "
            f"are per {LOSS_LEVEL[estimator]}; leave it out or give {aggregation}."
        )
    if getattr(args, "actor.policy_loss_type") != "ppo":
        remedy = (
            "--algo.grpo_s.ratio_mean geometric is GSPO's ratio"
            if estimator == "grpo_s"
            else "use --algo.advantage.estimator grpo_s with --algo.grpo_s.ratio_mean geometric for GSPO's ratio"
        )
        raise UsageError(
            f"--actor.policy_loss_type gspo does not fit --algo.advantage.estimator {estimator}, which brings its "
            f"own loss; leave it out ({remedy})."
        )
    setattr(args, "actor.loss_agg_mode", aggregation)
