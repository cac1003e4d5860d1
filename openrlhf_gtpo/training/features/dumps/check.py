"""Checks of dumps for ``--train.replay_rollouts``, and of the folder for ``--logger.dump_rollouts``."""

from pathlib import Path

import numpy as np

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.rollouts import FOLDER, RolloutDump, find_dumps, read_dump, vocabulary_digest
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.settings import refuse


def check_folder(args: Arguments) -> None:
    """Refuse a folder with dumps of an earlier run, unless this run resumes it.

    Raises:
        UsageError: ``--ckpt.path`` has such dumps.
    """
    there = sorted(Path(args.ckpt.path).glob(f"{FOLDER}/step_*.parquet"))
    if there and not args.ckpt.load_enable:
        raise UsageError(
            f"--ckpt.path {args.ckpt.path} has {there[0].name} of an earlier run, which this one could replace; give "
            "another folder."
        )


def check_dumps(args: Arguments, model: Model) -> None:
    """Read every dump and refuse those that this run cannot train on.

    Raises:
        UsageError: there is such a dump, or none at all.
    """
    combined = "--train.replay_rollouts cannot be combined with"
    refuse(
        (
            args.logger.dump_rollouts,
            f"{combined} --logger.dump_rollouts, which would write the same dumps again; leave one of them out.",
        ),
        (
            args.train.async_enable,
            f"{combined} --train.async_enable, as there is nothing to sample; leave one of them out.",
        ),
    )
    vocabulary = vocabulary_digest(model.tokenizer)
    assert args.train.replay_rollouts is not None
    try:
        for path in find_dumps(Path(args.train.replay_rollouts)):
            why_not = _why_not(read_dump(path), args, vocabulary)
            if why_not:
                raise ValueError(f"{path} {why_not}.")
    except ValueError as error:
        raise UsageError(f"--train.replay_rollouts: {error}") from error


def _why_not(dump: RolloutDump, args: Arguments, vocabulary: str) -> str | None:
    """Return why a run cannot train on a dump, as a clause that ends with the remedy; None if it can."""
    # The dump must be whole, with the run's tokens and groups.
    settings, rows, samples = dump.settings, dump.columns["row"], args.rollout.n_samples_per_prompt
    if settings["version"] < 2:
        return "is of version 1, which lacks what a replay needs; dump the step again"
    if len(rows) < settings["batch_rows"]:
        return (
            f"holds {len(rows)} of the step's {settings['batch_rows']} responses, but a replay needs whole steps; "
            f"dump with --logger.dump_rows {settings['batch_rows']}"
        )
    if settings["vocabulary"] != vocabulary:
        return (
            f"has token ids from the vocabulary of {settings['model']}, but --actor.model_name_or_path "
            f"{args.actor.model_name_or_path} has another; give a model with the same tokenizer"
        )
    counts = np.bincount(dump.columns["group"])
    if (counts != samples).any():
        return f"has {counts[0]} responses to a prompt; give --rollout.n_samples_per_prompt {counts[0]}, not {samples}"
    # Its values must fit the run's settings.
    if settings["temperature"] != args.rollout.temperature:
        return (
            f"was sampled at temperature {settings['temperature']:g}, but log-probs are computed at "
            f"--rollout.temperature {args.rollout.temperature:g}; give the same"
        )
    if args.rollout.entropy == "sampler" and settings["entropy"] != "sampler":
        return "has no entropies from the sampler; give --rollout.entropy actor"
    if args.algo.advantage.is_correction_level != "off" and dump.columns["rollout_log_probs"] is None:
        return (
            "has no log-probs from the sampler, which --algo.advantage.is_correction_level "
            f"{args.algo.advantage.is_correction_level} needs; give off"
        )
    if dump.columns["guided"] is not None and dump.columns["guided"].any():  # as check_guide refuses
        if args.algo.kl.unbiased_gradient and args.algo.kl.use_loss and args.algo.kl.init_coef > 0:
            return (
                "has rows of a guide, which --algo.kl.unbiased_gradient would treat as the old policy's; leave that "
                "flag out"
            )
        if args.algo.advantage.estimator == "gae":
            return "has rows of a guide, from which the critic of gae must not learn; give another estimator"
    return None
