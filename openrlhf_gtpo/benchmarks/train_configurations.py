"""The configurations that ``benchmark train`` runs: each parsed and checked as the trainer would, before any starts."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration import run
from openrlhf_gtpo.integration.command_line.checks import check_model, table_rows
from openrlhf_gtpo.integration.command_line.megatron_flags import fp8_of
from openrlhf_gtpo.report.step_phases import Setup

# What all configurations have to share, so that they are given the same work.
_SAME = (
    *("train.seed", "data.prompt_dataset", "data.prompt_split", "data.prompt_probs", "data.input_key", "data.max_len"),
    *("data.max_samples", "data.input_template", "data.apply_chat_template", "rollout.batch_size"),
    *("rollout.n_samples_per_prompt", "rollout.max_new_tokens", "rollout.temperature", "rollout.top_p"),
)


@dataclass(frozen=True)
class Configuration:
    """Fields:
    name: as the user gave it.
    argv: the trainer's flags.
    setup: for the arithmetic of its phases.
    dtype: "bf16" or "fp16", of the matrix product that MFU is over.
    """

    name: str
    argv: list[str]
    setup: Setup
    dtype: str


def split_compare(words: Sequence[str]) -> dict[str, list[str]]:
    """``NAME=FLAGS`` of each ``--compare`` to the name's flags, as a shell would split them.

    Raises:
        UsageError: no name, a name twice, or quotes that do not close.
    """
    found: dict[str, list[str]] = {}
    for word in words:
        name, equals, flags = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z0-9._-]+", name):
            raise UsageError(
                f'--compare {word!r} is not NAME="FLAGS", with a name of letters, digits, ".", "_" and "-"; write '
                "--compare megatron='--actor.backend megatron'."
            )
        if name in found:
            raise UsageError(f"--compare names {name} twice; give each configuration a name of its own.")
        try:
            found[name] = shlex.split(flags)
        except ValueError as error:
            raise UsageError(f"--compare {name}: its flags {flags!r} cannot be split into words: {error}.") from error
    return found


def configurations(common: Sequence[str], compare: Mapping[str, Sequence[str]], steps: int) -> list[Configuration]:
    """Check every configuration before the first is run.

    Args:
        common: the trainer's flags for all of them.
        compare: name to the flags that this one adds; a later flag wins over an earlier one.
        steps: that each run will make.

    Raises:
        UsageError: what the trainer would refuse, named by its configuration; work that cannot be compared; too few data.
    """
    found: list[Configuration] = []
    first: SimpleNamespace | None = None
    for name, flags in compare.items():
        argv = [*common, *flags]
        try:
            args = run.checked(argv)
            _check_measurable(args, steps)
        except UsageError as error:
            raise UsageError(f"configuration {name}: {error}") from error
        first = first or args
        for flag in _SAME:
            ours, theirs = _value(args, flag), _value(first, flag)
            if ours != theirs:
                raise UsageError(
                    f"--{flag} is {ours} in configuration {name} and {theirs} in {found[0].name}; both have to be given "
                    "the same work, so put it among the common flags behind --."
                )
        dtype = "bf16" if args.actor.backend == "megatron" else args.ds.param_dtype
        found.append(Configuration(name, argv, setup_of(args), dtype))
    if len({one.dtype for one in found}) > 1:
        raise UsageError("--ds.param_dtype differs between the configurations; MFU is over one product of one dtype.")
    return found


def setup_of(args: SimpleNamespace) -> Setup:
    """GPUs, operations and precisions of a run with ``args``, placed as OpenRLHF's ``train`` places its groups."""
    reference = args.algo.kl.init_coef > 0
    actor = _size(args.actor)
    engine = args.vllm.num_engines * args.vllm.tensor_parallel_size
    shared = args.train.colocate_all
    # GPUs beside the actors'.
    ref = 0 if not reference or shared or args.train.colocate_actor_ref else _size(args.ref)
    critic, reward = _critic_and_reward(args)
    models = actor + ref + critic + reward
    epochs = args.train.max_epochs
    fp8 = fp8_of(args) if args.actor.backend == "megatron" else None
    trained = f"fp8 ({fp8.mode}, {fp8.recipe})" if fp8 else "bf16"
    if args.actor.backend != "megatron":
        trained = args.ds.param_dtype
    return Setup(
        gpus=models + (0 if shared else engine),
        busy={
            "rollout": engine,
            "old_log_probs": models,
            "shaping": 0,  # in the controller
            "train": actor + critic,
            "weight_sync": actor if shared else actor + engine,
        },
        # Training: forward, and the gradients of inputs and of weights.
        passes={"rollout": 1, "old_log_probs": 2 if reference else 1, "train": 3 * epochs},
        epochs=epochs,
        precision={"rollout": "bf16", "old_log_probs": trained, "train": trained},
    )


def _critic_and_reward(args: SimpleNamespace) -> tuple[int, int]:
    """GPUs of the two groups that no other group has."""
    critic = _size(args.critic) if args.critic.model_name_or_path else 0
    reward = _size(args.reward) if not args.reward.remote_url else 0
    if critic and args.train.colocate_critic_reward:
        return critic, 0
    return (0, 0) if args.train.colocate_all else (critic, reward)


def _check_measurable(args: SimpleNamespace, steps: int) -> None:
    if not args.vllm.num_engines:
        raise UsageError(
            f"--vllm.num_engines {args.vllm.num_engines} starts no engine to sample from; give at least 1."
        )
    if args.train.async_enable:
        raise UsageError(
            "--train.async_enable lets the phases of different steps overlap, so that no phase has seconds of its own; "
            "leave it out."
        )
    check_model(args.actor.model_name_or_path, "--actor.model_name_or_path", args.actor.trust_remote_code)
    if not args.data.prompt_dataset:
        raise UsageError("--data.prompt_dataset is missing; give a data set.")
    rows = table_rows(args.data.prompt_dataset, args.data.prompt_split, "--data.prompt_dataset")
    needed = steps * args.rollout.batch_size
    if rows is not None and min(rows, args.data.max_samples) < needed:
        raise UsageError(
            f"--data.prompt_dataset {args.data.prompt_dataset} gives {min(rows, args.data.max_samples)} prompts, but "
            f"{steps} steps of --rollout.batch_size {args.rollout.batch_size} take {needed}; give more data, fewer steps "
            "or smaller ones."
        )


def _size(section: SimpleNamespace) -> int:
    return section.num_nodes * section.num_gpus_per_node


def _value(args: SimpleNamespace, flag: str) -> Any:
    value: Any = args
    for name in flag.split("."):
        value = getattr(value, name)
    return value


def new_folder(path: Path) -> Path:
    """Make the folder for the runs.

    Raises:
        UsageError: it cannot be made, or holds something already.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise UsageError(f"--runs {path} holds files already; give a new folder.")
    except OSError as error:
        raise UsageError(f"--runs {path} cannot be made: {error.strerror}.") from error
    return path.resolve()
