"""The configurations of ``benchmark train``, all parsed and checked by the trainer's rules before any starts."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from benchmarks.suite.step_phases import Setup
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.data import table_rows
from openrlhf_gtpo.training.credit.old_policy import always_forwards, count_rows
from openrlhf_gtpo.training.host import gpus_of
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of

# Flags that must be equal in all configurations, so that the workload is the same.
_SAME = (
    *("train.seed", "data.prompt_dataset", "data.prompt_split", "data.prompt_probs", "data.input_key", "data.max_len"),
    *("data.max_samples", "data.input_template", "data.apply_chat_template", "rollout.batch_size"),
    *("data.chat_template_kwargs", "data.chat_template_kwargs_key", "data.tools_key", "data.system_prompt"),
    "rollout.vllm_generate_batch_size",
    *("rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
)


@dataclass(frozen=True)
class Configuration:
    """A checked command line of the trainer.

    Fields:
        name: as the user gave it.
        argv: the trainer's flags.
        setup: inputs for the arithmetic of its phases.
        dtype: "bf16" or "fp16", of the matrix product that MFU is relative to.
    """

    name: str
    argv: list[str]
    setup: Setup
    dtype: str


def split_compare(words: Sequence[str]) -> dict[str, list[str]]:
    """Map the name in each ``--compare NAME=FLAGS`` to its flags, split as by a shell.

    Raises:
        UsageError: a missing name, a repeated name, or quotes that do not close.
    """
    by_name: dict[str, list[str]] = {}
    for word in words:
        name, equals, flags = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UsageError(
                f'--compare {word!r} is not NAME="FLAGS", with a name of letters, digits, ".", "_" and "-"; write '
                "--compare megatron='--actor.backend megatron'."
            )
        if name in by_name:
            raise UsageError(f"--compare has {name} twice; give each configuration its own name.")
        try:
            by_name[name] = shlex.split(flags)
        except ValueError as error:
            raise UsageError(f"--compare {name}: the shell syntax of {flags!r} is wrong: {error}.") from error
    return by_name


def configurations(common: Sequence[str], compare: Mapping[str, Sequence[str]], steps: int) -> list[Configuration]:
    """Check every configuration before the first is run.

    Args:
        common: the trainer's flags for all of them.
        compare: by name, the flags that a configuration adds. A later flag overrides an earlier one.
        steps: number of steps of each run.

    Raises:
        UsageError: the trainer rejects a configuration, the workloads differ, or there is too little data.
    """
    checked: list[Configuration] = []
    first: Arguments | None = None
    for name, flags in compare.items():
        argv = [*common, *flags]
        try:
            args = run.parse(argv)
            run.check(args)
            _check_measurable(args, steps)
        except UsageError as error:
            raise UsageError(f"configuration {name}: {error}") from error
        first = first or args
        for flag in _SAME:
            value, first_value = attrgetter(flag)(args), attrgetter(flag)(first)
            if value != first_value:
                raise UsageError(
                    f"--{flag} is {value} in configuration {name} and {first_value} in {checked[0].name}; "
                    "configurations must have the same workload, so move it to the common flags after --."
                )
        checked.append(Configuration(name, argv, setup_of(args), _dtype(args)))
    if len({configuration.dtype for configuration in checked}) > 1:
        raise UsageError("--ds.param_dtype differs between the configurations; give all the same, for one MFU.")
    return checked


def setup_of(args: Arguments) -> Setup:
    """Return GPUs, operations and precisions of a run with ``args``, with groups placed as by OpenRLHF's ``train``."""
    gpus = gpus_of(args)
    models = sum(gpus) - gpus.engines - gpus.other_engines
    epochs = args.train.max_epochs
    forwards = always_forwards(args, count_rows(args))
    has_reference = args.algo.kl.init_coef > 0
    reference_beside = has_reference and not gpus.reference  # on the actor's GPUs
    trained = _dtype(args)
    if args.actor.backend == "megatron" and (fp8 := fp8_of(args)):
        trained = f"fp8 ({fp8.mode}, {fp8.recipe})"
    return Setup(
        gpus=sum(gpus),
        busy={
            "rollout": (gpus.engines or gpus.actor) + gpus.other_engines,  # colocated engines share the actor's
            "old_log_probs": models if forwards or reference_beside else models - gpus.actor,
            "shaping": 0,  # in the controller
            "train": gpus.actor + gpus.critic,
            "weight_sync": gpus.actor + gpus.engines,
        },
        # Without audits. Training is a forward pass plus the gradients of inputs and weights.
        passes={"rollout": 1, "old_log_probs": forwards + has_reference, "train": 3 * epochs},
        epochs=epochs,
        precision={"rollout": "bf16", "old_log_probs": trained, "train": trained},
    )


def _check_measurable(args: Arguments, steps: int) -> None:
    if not args.data.prompt_dataset:
        raise UsageError("--data.prompt_dataset is missing; give a data set.")
    rows = table_rows(args, args.data.prompt_dataset, args.data.prompt_split, "--data.prompt_dataset")
    needed = steps * args.rollout.batch_size
    available = needed if rows is None else min(rows, args.data.max_samples) * args.train.num_episodes
    if available < needed:
        raise UsageError(
            f"--data.prompt_dataset {args.data.prompt_dataset} has {available} prompts, but {steps} steps of "
            f"--rollout.batch_size {args.rollout.batch_size} need {needed}; give more data, or fewer or smaller "
            "steps."
        )


def _dtype(args: Arguments) -> str:
    return "bf16" if args.actor.backend == "megatron" else args.ds.param_dtype
