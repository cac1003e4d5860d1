"""Checks of OpenRLHF's flags whose bad values would change a run silently, or fail only after minutes; and absolute
paths.

Most of OpenRLHF's flags are not here, because their readers refuse a bad value within a minute.
"""

import os
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.settings import flags
from openrlhf_gtpo.training.settings.setting import Bounds

_RANGES: tuple[tuple[Bounds, tuple[str, ...]], ...] = (
    # Divisors of a rollout; with 0 epochs a run would silently train nothing.
    (
        Bounds(at_least=1),
        ("train.batch_size", "train.micro_batch_size", "train.max_tokens_per_gpu", "train.max_epochs")
        + ("rollout.micro_batch_size", "rollout.max_tokens_per_gpu"),
    ),
    # They matter late, at the first evaluation, checkpoint or log. With ckpt.max_num 0 no checkpoint remains.
    (Bounds(at_least=1), ("eval.n_samples_per_prompt", "logger.logging_steps", "ckpt.max_num")),
    # vLLM's limits, which it checks at the first response, once all models are loaded.
    (Bounds(at_least=0, at_most=2), ("rollout.temperature", "eval.temperature")),
    (Bounds(above=0, at_most=1), ("rollout.top_p",)),
    # A learning rate such as 1e6, a negative clip range or a negative KL coefficient would train nonsense.
    (Bounds(at_least=0, at_most=1), ("actor.adam.lr", "actor.muon.lr")),
    (Bounds(at_least=0, or_infinite=True), ("actor.eps_clip", "actor.eps_clip_low_high")),
    (Bounds(at_least=0), ("algo.kl.init_coef",)),
)


# OpenRLHF's paths; this package's are settings with a FILE (written) or DIR (read), and models.
_WRITTEN = ("ckpt.output_dir", "ckpt.path", "logger.tensorboard_dir")
_READ = (
    *("data.prompt_dataset", "eval.dataset", "reward.remote_url", "train.agent_func_path"),
    *("actor.model_name_or_path", "critic.model_name_or_path", "reward.model_name_or_path"),
)


def absolute_paths(args: Arguments) -> dict[str, Any]:
    """Make relative paths absolute, from the folder of the command: Ray's processes may run in another, such as the
    folder of ``ray start``. The name of a model, data set or reward counts as a path only if that exists, as it
    may be on the Hub or a server.

    Args:
        args: the run's arguments.

    Returns:
        The changes, by flag.

    Raises:
        UsageError: the run would write into Ray's copy of a job's working folder, which Ray removes.
    """
    own = {setting.flag: setting.metavar for setting in flags.all_settings()}
    changes: dict[str, Any] = {}
    written = [*_WRITTEN, *(flag for flag in own if own[flag] == "FILE")]
    for flag in (*written, *(flag for flag in own if own[flag] == "DIR")):
        if value := attrgetter(flag)(args):
            changes[flag] = path = str(Path(value).absolute())
            # ray 2.55.0, _private/runtime_env/working_dir.py
            if flag in written and "working_dir_files" in Path(path).parts:
                raise UsageError(
                    f"--{flag} is in Ray's copy of the job's working folder, which Ray removes: {path}; give an "
                    "absolute path to a folder that stays."
                )
    for flag in (*_READ, *(flag for flag in own if flag.endswith(".model_name_or_path"))):
        value = attrgetter(flag)(args)
        if isinstance(value, list | tuple):
            changes[flag] = tuple(map(_absolute, value))
        elif value:
            changes[flag] = ",".join(map(_absolute, value.split(",")))
    changes["vllm.others"] = tuple(
        group._replace(model_name_or_path=_absolute(group.model_name_or_path)) for group in args.vllm.others
    )
    return changes


def _absolute(name: str) -> str:
    """Make one name absolute; a data set's may have ``@`` and a folder within it."""
    path, at, folder = name.strip().partition("@")
    return f"{Path(path).absolute()}{at}{folder}" if path and os.path.exists(path) else name


def check_values(values: dict[str, Any]) -> None:
    """Refuse a run without a reward or an engine, and settings out of range.

    Args:
        values: the parsed command line, by flag; None for a flag that was not given.

    Raises:
        UsageError: the first mistake.
    """
    reward_url = values["reward.remote_url"] or values["train.agent_func_path"]
    if not reward_url and not values["reward.model_name_or_path"]:
        raise UsageError(
            "The run has no reward: give --reward.remote_url FILE.py (a reward function) or URL, "
            "--reward.model_name_or_path, or --train.agent_func_path."
        )
    if (values["vllm.num_engines"] or 0) < 1:
        raise UsageError(f"Expected --vllm.num_engines >= 1 to sample from, got {values['vllm.num_engines']}.")
    for name in ("algo.advantage.is_correction_threshold", "reward.clip_range"):
        pair = values[name]
        if pair is not None and len(pair) == 2 and not pair[0] < pair[1]:
            raise UsageError(f"Expected --{name} LOW HIGH with LOW < HIGH, got {pair[0]:g} {pair[1]:g}.")
    for name in ("eval.steps", "ckpt.save_steps"):
        if values[name] != -1 and values[name] < 1:  # OpenRLHF divides by it after the first step
            raise UsageError(f"Expected --{name} >= 1, or -1 for never, got {values[name]}.")
    check_template(values["data.input_template"])
    check_ranges(values)
    flags.check_ranges(values)


def check_template(template: str | None) -> None:
    """Refuse an ``--data.input_template`` without a place for the question. OpenRLHF's training drops such a template
    (openrlhf 0.11.2, cli/train_ppo_ray.py); elsewhere all prompts would be the same text."""
    if template and "{}" not in template.replace("{{", ""):  # {{ is a brace in the text
        raise UsageError(f"Expected --data.input_template to have {{}}, where the question goes, got {template!r}.")


def check_ranges(values: Mapping[str, Any]) -> None:
    """Refuse numbers that OpenRLHF or vLLM would accept, or refuse too late.

    Args:
        values: a command line's values, by flag; None for a flag that was not given.

    Raises:
        UsageError: the first such number.
    """
    for bounds, names in _RANGES:
        for name in names:
            bounds.check(name, values.get(name))
