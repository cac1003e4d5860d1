"""The flags that this package adds to OpenRLHF's command line, and the defaults that an algorithm brings with it."""

import argparse
import dataclasses
import os
import typing
from collections.abc import Collection
from typing import Any

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings import megatron_flags, replay
from openrlhf_gtpo.training.settings.unread_flags import name_unread

# OpenRLHF's names for the aggregations that divide by the tokens, or by the rows, of the whole optimizer step.
AGGREGATION = {"token": "token-mean", "sequence": "seq-mean-token-mean"}

# Whole algorithms built from OpenRLHF's parts. A flag on the command line wins over its preset's value. For where they
# depart from their papers, see docs/algorithms.md.
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

# Settings of surrogates that OpenRLHF has flags for: --actor.eps_clip_low_high and --actor.dual_clip.
_UPSTREAM_FLAGS = ("clip_low", "clip_high", "dual_clip")

# DAPO's buffer as a share of the longest response (4096 of 20480 tokens).
_DAPO_BUFFER_SHARE = 0.2


class Secret(str):
    """Text that is hidden when the arguments are printed, to a log or to W&B's configuration."""

    def __repr__(self) -> str:
        return "'***'"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add this package's flags, and its estimators to the choices of ``--algo.advantage.estimator``."""
    estimator = parser._option_string_actions["--algo.advantage.estimator"]
    assert estimator.choices is not None
    estimator.choices = [*estimator.choices, *ESTIMATORS]
    ours = (f"{name} ({one.summary})" for name, one in ESTIMATORS.items())
    estimator.help = f"{estimator.help}; {', '.join(ours)}"
    clip_range = parser._option_string_actions["--reward.clip_range"]
    clip_range.help = (
        f"{clip_range.help}; {', '.join(ESTIMATORS)} clip their advantages with it, and only if it is given"
    )
    loss_type = parser._option_string_actions["--actor.policy_loss_type"]
    assert loss_type.choices is not None
    loss_type.choices = [*loss_type.choices, *SURROGATES]
    surrogates = ", ".join(f"{name} ({one.summary})" for name, one in SURROGATES.items())
    loss_type.help = f"how a step is clipped: OpenRLHF's ppo and gspo; {surrogates}"

    group = parser.add_argument_group("openrlhf_gtpo")
    group.add_argument(
        "--algo.preset",
        choices=sorted(PRESETS),
        help="select a whole algorithm: its estimator, loss, clip range, KL, filtering and length penalty; "
        "flags given with it win. dapo, and forking_tokens, built on it, are for rewards of 0 and 1 (for -1 and 1 "
        "add --reward.overlong_penalty_factor 1 --algo.dynamic_filtering_range -1 1) and need "
        "--rollout.max_new_tokens; grpo averages its KL over tokens, the paper over each response first",
    )
    group.add_argument(
        "--actor.trust_remote_code",
        action="store_true",
        help="run the Python code that a checkpoint of actor, reward, critic or guide brings (auto_map in its "
        "configuration files); without this flag such a checkpoint is refused",
    )
    group.add_argument(
        "--reward.overlong_form",
        choices=["continuous", "as_printed"],
        default="continuous",
        help=f"shape of the overlong penalty for {', '.join(ESTIMATORS)}: DAPO's continuous one, or the paper's as "
        "printed",
    )
    group.add_argument(
        "--rollout.entropy",
        choices=["actor", "sampler", "auto"],
        default="actor",
        help="take entropies from the actor's old-policy forward, or from vLLM's sampler, which saves that forward if "
        "nothing else needs it; auto: the sampler's if that saves the forward",
    )
    group.add_argument(
        "--rollout.log_probs",
        choices=["actor", "sampler"],
        default="actor",
        help="what bounds several optimizer steps of a rollout with --rollout.entropy sampler: the old log-probs of "
        "the actor's forward, or the sampler's, through --algo.advantage.is_correction_level, without that forward",
    )
    group.add_argument(
        "--rollout.entropy_audit_steps",
        type=int,
        default=20,
        help="compare the sampler's entropies with the actor's in the first batch and then every N-th; 0 never",
    )
    group.add_argument(
        "--rollout.entropy_audit_gate",
        type=float,
        default=0.1,
        help="take the actor's entropies while the sampler's are off by more nats than this on average; inf never",
    )
    _add_guide_flags(parser.add_argument_group("openrlhf_gtpo guide", "a stronger policy that samples too"))
    group.add_argument(
        "--eval.before_training", action="store_true", help="evaluate --eval.dataset once before the first step"
    )
    group.add_argument(
        "--ckpt.stop_file",
        help="when this file appears, save a checkpoint after the step in progress and exit with status 75 (default: "
        "'stop' in --ckpt.path; one left there by an earlier run does not count)",
    )
    group.add_argument(
        "--ckpt.load_tag",
        type=lambda tag: tag or None,  # a supervised run gives "" to go on from its own checkpoint
        help="with --ckpt.load_enable, go on from this checkpoint, such as global_step40 (default: the newest one)",
    )
    group.add_argument(
        "--train.max_bad_steps",
        type=int,
        default=3,
        help="stop after this many optimizer steps in a row with a non-finite gradient or loss, all of them skipped",
    )
    group.add_argument(
        "--train.spike_zscore",
        type=float,
        default=0.0,
        help="stop without saving if loss, KL or gradient norm is this many deviations above that of the last 50 "
        "steps; 0 never",
    )
    group.add_argument(
        "--train.max_restarts",
        type=int,
        default=0,
        help="how often a run may replace engines that died or hang, and retry rewards that fail; and how often it is "
        "restarted from its last checkpoint if another process died or hangs; 0 stops at the first",
    )
    group.add_argument(
        "--train.stall_timeout",
        type=float,
        default=0.0,
        help="seconds without an answer after which a process or a reward counts as hanging; 0 waits forever. It must "
        "be longer than the slowest reward, and than each phase of a step except the rollout, including a checkpoint",
    )
    group.add_argument(
        "--train.replay_rollouts",
        metavar="DIR",
        help="train on what --logger.dump_rollouts wrote to DIR, a step per dump, without engines, prompts or rewards",
    )
    group.add_argument("--logger.metrics_path", help="append every step's metrics to this JSON-lines file")
    group.add_argument(
        "--logger.dump_rollouts",
        type=int,
        default=0,
        metavar="N",
        help="write every N-th step's rollouts to 'rollouts' in --ckpt.path, for cli.view; 0 never",
    )
    group.add_argument(
        "--logger.dump_rows",
        type=int,
        default=64,
        metavar="M",
        help="limit on the responses in a dump: whole groups, sampled anew each step, and at least one",
    )
    group.add_argument(
        "--logger.entropy_enable",
        action="store_true",
        help=f"log policy entropies with the other estimators too ({', '.join(ESTIMATORS)} always do)",
    )
    group.add_argument(
        "--vllm.max_num_seqs",
        type=int,
        help="limit on the responses that an engine decodes at once (default: vLLM's for an engine in an actor, 128)",
    )
    group.add_argument(
        "--vllm.max_num_batched_tokens",
        type=int,
        help="limit on the tokens that an engine computes per step, prompts included (default: likewise vLLM's, 2048)",
    )
    group.add_argument(
        "--vllm.sync_bucket_mb", type=int, default=256, help="size of one bucket of the weight transfer, in MiB"
    )
    group.add_argument(
        "--vllm.sync_checksum",
        action="store_true",
        help="verify after every transfer that each parameter reached every engine; stop the run if one did not",
    )
    for name, one in ESTIMATORS.items():
        group = parser.add_argument_group(
            f"openrlhf_gtpo {name}", f"{one.summary}, with --algo.advantage.estimator {name}"
        )
        _add_config_flags(group, f"--algo.{name}.", one.config)
    for name, kind in SURROGATES.items():
        group = parser.add_argument_group(
            f"openrlhf_gtpo {name}", f"{kind.summary}, with --actor.policy_loss_type {name}"
        )
        _add_config_flags(group, f"--actor.{name}.", kind.config, without=_UPSTREAM_FLAGS)
    megatron_flags.add_flags(parser)


def _add_guide_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--algo.guide.model_name_or_path",
        help="checkpoint of the guide, a frozen policy with the same tokenizer that samples part of each group",
    )
    group.add_argument(
        "--algo.guide.fraction", type=float, default=0.0, help="fraction of each group's rows that the guide samples"
    )
    group.add_argument(
        "--algo.guide.steps", type=int, default=0, help="training steps over which that fraction falls to 0; 0 never"
    )
    group.add_argument(
        "--algo.guide.ratio_cap",
        type=float,
        default=2.0,
        help="largest ratio of the policy to the guide at a token of the guide's rows",
    )
    group.add_argument(
        "--algo.guide.rescue_batch",
        type=int,
        default=0,
        help="have the guide answer prompts that dynamic filtering dropped because no response was right, as soon as "
        "this many are waiting; 0 never",
    )
    group.add_argument(
        "--algo.guide.rescue_weight", type=float, default=1.0, help="weight of the loss of such prompts' groups"
    )
    group.add_argument(
        "--algo.guide.endpoint",
        metavar="URL",
        help="OpenAI-compatible endpoint that serves the guide under that name in place of engines, such as the one "
        "that vllm serve opens at http://HOST:8000/v1",
    )
    group.add_argument("--algo.guide.num_engines", type=int, default=1, help="vLLM engines of the guide")
    group.add_argument("--algo.guide.tensor_parallel_size", type=int, default=1, help="GPUs of each of them")
    group.add_argument(
        "--algo.guide.gpu_memory_utilization",
        type=float,
        help="share of each of their GPUs' memory (default: --vllm.gpu_memory_utilization)",
    )
    group.add_argument(
        "--algo.guide.on_failure",
        choices=["stop", "continue"],
        default="stop",
        help="if the guide dies: stop the run, or go on without it",
    )


def _add_config_flags(
    group: argparse._ArgumentGroup, prefix: str, config: type, without: Collection[str] = ()
) -> None:
    types = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        kind, variants = types[field.name], field.metadata.get("variants")
        readers = f" (read by {', '.join(variants)})" if variants else ""
        options: dict[str, Any] = {"default": field.default, "help": field.metadata["help"] + readers}
        if typing.get_origin(kind) is typing.Literal:
            options["choices"] = typing.get_args(kind)
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = kind
        group.add_argument(prefix + field.name, **options)


def adjust(args: argparse.Namespace, given: frozenset[str]) -> None:
    """Fill in what the chosen preset or estimator implies, for destinations not in ``given``.

    Raises:
        UsageError: a flag that contradicts the preset, the estimator's loss level or the actor's backend.
    """
    values = vars(args)  # by flag
    if values["logger.wandb.key"]:  # the trackers of a cluster do not have this process's environment
        values["logger.wandb.key"] = Secret(os.environ.get("WANDB_API_KEY") or values["logger.wandb.key"])
        if values["logger.wandb.key"] == "WANDB_API_KEY":
            raise UsageError(
                "--logger.wandb.key WANDB_API_KEY takes the key from that variable, which is not set here; export it "
                "where the trainer runs (on a Ray cluster, before its head starts)."
            )
    if "actor.eps_clip" in given:
        given |= {"actor.eps_clip_low_high"}  # OpenRLHF takes its one value for both bounds
    preset = values["algo.preset"]
    if preset is not None:
        if "algo.advantage.estimator" in given:
            raise UsageError(
                f"--algo.preset {preset} brings its own estimator; drop --algo.advantage.estimator or the preset."
            )
        values.update({flag: value for flag, value in PRESETS[preset].items() if flag not in given})
    if "reward.overlong_penalty_factor" in PRESETS.get(preset, ()) and "reward.overlong_buffer_len" not in given:
        longest = values["rollout.max_new_tokens"]
        if not longest:
            # OpenRLHF's penalty counts back from --data.max_len then; that of our estimators does not.
            instead = ", or --reward.overlong_buffer_len to count back from --data.max_len"
            raise UsageError(
                f"--algo.preset {preset} penalizes responses that come close to --rollout.max_new_tokens, which is "
                f"missing; give it{'' if values['algo.advantage.estimator'] in ESTIMATORS else instead}."
            )
        values["reward.overlong_buffer_len"] = float(max(1, int(longest * _DAPO_BUFFER_SHARE)))

    if values["actor.policy_loss_type"] in SURROGATES:
        _follow_surrogate(values, given)
    elif values["algo.advantage.estimator"] in ESTIMATORS:
        _follow_loss_level(values, given)
        if "actor.eps_clip_low_high" not in given:
            values["actor.eps_clip_low_high"] = [0.2, 0.28]
    if values["algo.advantage.estimator"] in ESTIMATORS and "reward.clip_range" not in given:
        values["reward.clip_range"] = None  # OpenRLHF's ±10 is for rewards, and would cut shaped advantages
    megatron_flags.adjust(args, given)
    _follow_guide(values)
    name_unread(values, given)
    if values["train.replay_rollouts"] is not None:
        replay.adjust(values)


def _follow_loss_level(values: dict[str, Any], given: frozenset[str]) -> None:
    """Sequence advantages go with a sequence loss, token advantages with a token loss."""
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
    """Take a surrogate's clip range and mean from its paper; a sequence-level one needs one advantage per row."""
    name, estimator = values["actor.policy_loss_type"], values["algo.advantage.estimator"]
    kind = SURROGATES[name]
    defaults = {field.name: field.default for field in dataclasses.fields(kind.config)}
    if values["actor.dual_clip"] is not None and "dual_clip" not in defaults:
        raise UsageError(
            f"--actor.dual_clip bounds the smaller of a clipped and an unclipped term, which --actor.policy_loss_type "
            f"{name} does not have; leave it out."
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
        values["actor.entropy_coef"] = 0.0  # with which the training forward has entropies
    if "clip_low" in defaults and "actor.eps_clip_low_high" not in given:
        values["actor.eps_clip_low_high"] = [defaults["clip_low"], defaults["clip_high"]]


def _follow_guide(values: dict[str, Any]) -> None:
    """Leave out a guide that samples nothing, and refuse one without a name."""
    if values["algo.guide.endpoint"] == "":
        raise UsageError("Expected --algo.guide.endpoint to look like http://HOST:PORT/v1, got an empty string.")
    asked = [name for name in ("fraction", "rescue_batch") if values[f"algo.guide.{name}"] > 0]
    if asked and not values["algo.guide.model_name_or_path"]:
        raise UsageError(f"--algo.guide.{asked[0]} needs a guide; give --algo.guide.model_name_or_path.")
    if not asked:
        values["algo.guide.model_name_or_path"] = None
    if values["algo.guide.gpu_memory_utilization"] is None:
        values["algo.guide.gpu_memory_utilization"] = values["vllm.gpu_memory_utilization"]


def _check_one_advantage_per_row(values: dict[str, Any], name: str, estimator: str) -> None:
    """Refuse credit that differs between the tokens of a response."""
    why, remedy = None, "give gspo_token, or an estimator such as group_norm or grpo_s"
    ours = ESTIMATORS.get(estimator)
    discounts = estimator == "gae" or (estimator == "reinforce" and values["algo.advantage.gamma"] != 1)
    if discounts or (ours and ours.level == "token"):
        why = f"--algo.advantage.estimator {estimator} gives every token its own"
    elif not ours and values["algo.kl.init_coef"] > 0 and not values["algo.kl.use_loss"]:
        why = "the KL in the reward gives every token its own"
        remedy = "give --algo.kl.use_loss or --algo.kl.init_coef 0"
    if why:
        raise UsageError(f"--actor.policy_loss_type {name} wants one advantage per response, but {why}; {remedy}.")
