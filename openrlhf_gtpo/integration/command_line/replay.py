"""``--train.replay_rollouts``: what such a run does not read, and the dumps that it can train on."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.input_checks import load_tokenizer
from openrlhf_gtpo.report.rollouts import RolloutDump, find_dumps, read_dump, vocabulary_digest

# How the flags begin that only sampling, rewards, evaluation and the length of a run are made with.
_NOT_READ = (
    "vllm.",
    "eval.",
    "reward.remote_url",
    "reward.model_name_or_path",
    "reward.num_",
    "data.prompt_",
    "data.input_",
    "data.label_key",
    "data.apply_chat_template",
    "data.max_samples",
    "data.dataloader_num_workers",
    "rollout.top_p",
    "rollout.vllm_generate_batch_size",
    "rollout.entropy_audit",
    "algo.dynamic_filtering",
    *(
        f"algo.guide.{name}"
        for name in ("model", "fraction", "steps", "endpoint", "num_engines", "tensor", "gpu", "on_failure", "rescue")
    ),
    "train.agent_func_path",
    "train.num_episodes",
)
_ABSENT = "replay"  # as upstream calls an agent's reward "agent": so that no actor is made for one


def adjust(values: dict[str, Any], given: frozenset[str]) -> None:
    """Leave out, of the parsed command line ``values`` by flag, what a replay does not read, naming what was ``given``
    of it. OpenRLHF's own checks still see an engine and a reward.

    Raises:
        UsageError: the folder's name is empty, as of a script's variable that is not set.
    """
    if not values["train.replay_rollouts"]:
        raise UsageError("Expected --train.replay_rollouts to be a folder with dumps, got an empty word.")
    unread = sorted(f"--{flag}" for flag in given if flag.startswith(_NOT_READ))
    if unread:
        why = "--train.replay_rollouts has no engines, and the dumps have what was sampled"
        print(f"These flags were given but have no effect here: {', '.join(unread)} ({why}).", file=sys.stderr)
    values |= {"vllm.num_engines": 1, "eval.dataset": None, "train.agent_func_path": None}
    values |= {"algo.dynamic_filtering_enable": False, "rollout.entropy_audit_steps": 0}
    # The dumps say which rows are the guide's, and have no rescued ones.
    values |= {"algo.guide.model_name_or_path": None, "algo.guide.rescue_batch": 0}
    if not values["reward.model_name_or_path"]:  # which gae may start its critic from
        values["reward.remote_url"] = _ABSENT


def leave_out_engines(args: SimpleNamespace) -> None:
    """Take engines and the actor for a reward out of the run, after OpenRLHF's own checks."""
    args.vllm.num_engines = 0
    args.reward.remote_url = [_ABSENT]


def check(args: SimpleNamespace) -> None:
    """Read every dump.

    Raises:
        UsageError: there is none, or one that this run cannot train on.
    """
    for given, flag, why in (
        (args.logger.dump_rollouts, "--logger.dump_rollouts", "which would write again what is read"),
        (args.data.max_images_per_prompt, "--data.max_images_per_prompt", "since dumps hold no images"),
    ):
        if given:
            raise UsageError(f"--train.replay_rollouts does not go with {flag}, {why}; leave one of them out.")
    model = args.actor.model_name_or_path
    vocabulary = vocabulary_digest(load_tokenizer(model, "--actor.model_name_or_path", args.actor.trust_remote_code))
    try:
        for path in find_dumps(Path(args.train.replay_rollouts)):
            why_not = _why_not(read_dump(path), args, vocabulary)
            if why_not:
                raise ValueError(f"{path} {why_not}.")
    except ValueError as error:
        raise UsageError(f"--train.replay_rollouts: {error}") from error


def _why_not(dump: RolloutDump, args: SimpleNamespace, vocabulary: str) -> str | None:
    """What keeps a run from training on a dump, as a clause with what to do; None where it can."""
    settings, rows, samples = dump.settings, dump.columns["row"], args.rollout.n_samples_per_prompt
    if settings["version"] < 2:
        return "is of version 1, without what a replay has to know; dump the step again"
    if len(rows) < settings["batch_rows"]:
        return (
            f"holds {len(rows)} of the step's {settings['batch_rows']} responses, and a replay needs whole steps; "
            f"dump with --logger.dump_rows {settings['batch_rows']}"
        )
    if settings["vocabulary"] != vocabulary:
        return (
            f"has token ids of another vocabulary, that of {settings['model']}, than --actor.model_name_or_path "
            f"{args.actor.model_name_or_path}; give a model with the same tokenizer"
        )
    counts = np.bincount(dump.columns["group"])
    if (counts != samples).any():
        return f"has {counts[0]} responses to a prompt; give --rollout.n_samples_per_prompt {counts[0]}, not {samples}"
    if settings["temperature"] != args.rollout.temperature:
        return (
            f"was sampled at {settings['temperature']:g}, not at --rollout.temperature {args.rollout.temperature:g}, "
            "with which log-probs are computed; give the same"
        )
    if args.rollout.entropy == "sampler" and settings["entropy"] != "sampler":
        return "has no entropies of the sampler; give --rollout.entropy actor"
    if args.algo.advantage.is_correction_level != "off" and dump.columns["rollout_log_probs"] is None:
        return (
            "has no log-probs of the sampler, which --algo.advantage.is_correction_level "
            f"{args.algo.advantage.is_correction_level} compares with; give off"
        )
    return None
