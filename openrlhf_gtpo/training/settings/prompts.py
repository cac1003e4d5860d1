"""Settings of prompts, and the file that keeps them with a trained model for ``cli.ask``, ``cli.evaluate`` and
``cli.score``. ``checks/prompts.py`` makes the prompts."""

import argparse
import json
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.settings.setting import Group, Setting, needs_flag

FILE = "prompts.json"  # in a folder of a trained model

# Arguments of Transformers' apply_chat_template that are not variables of a template, or that a flag sets.
_RESERVED = frozenset(
    "conversation messages tools chat_template add_generation_prompt continue_final_message tokenize padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def template_variables(value: Any) -> dict[str, Any]:
    """Return a chat template's variables from ``value``: an object, its JSON text, or None or "" for none.

    Raises:
        ValueError: as a clause; it is something else, or has a name that is not a template's variable.
    """
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"it is not JSON ({error}): {value:.60}") from error
    if not isinstance(value, dict):
        raise ValueError(f'expected a JSON object, such as {{"enable_thinking": false}}, got {value!r:.60}')
    if reserved := sorted(_RESERVED & value.keys()):
        instead = " (tools come from --data.tools_key)" if "tools" in reserved else ""
        raise ValueError(f"{', '.join(reserved)} is not a variable of a template{instead}")
    return value


def _flag(text: str) -> str:
    try:
        template_variables(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text  # as text, because upstream would turn an object into a namespace


PROMPTS = Group(
    "prompts",
    "what the chat template gets besides the messages; saved with the trained model for the other commands, where an "
    "empty text resets it",
    (
        Setting(
            "data.chat_template_kwargs",
            None,
            "variables for the chat template, as a JSON object such as '{\"enable_thinking\": false}' for Qwen3; "
            "variables that the template ignores are reported",
            _flag,
            metavar="JSON",
        ),
        Setting(
            "data.chat_template_kwargs_key",
            None,
            "column with a row's own template variables, which override --data.chat_template_kwargs by name; "
            "missing or null means none",
            metavar="COLUMN",
        ),
        Setting(
            "data.tools_key",
            None,
            "column with the tools for the chat template: a list of JSON schemas, or its JSON text; missing or null "
            "means none",
            metavar="COLUMN",
        ),
        Setting(
            "data.system_prompt",
            None,
            "system message for every row whose messages do not begin with one",
            metavar="TEXT",
        ),
    ),
    needs=(needs_flag("data.apply_chat_template"),),
    page="train.md#prompts",
)

NONE: Mapping[str, Any] = {setting.flag: setting.default for setting in PROMPTS.settings}
AGENT = "train.agent_func_path"
_KEPT = ("data.apply_chat_template", "data.input_template", *NONE, "rollout.temperature")


def keep_prompts(folder: Path, args: Arguments) -> None:
    """Save a run's settings of prompts, from its arguments ``args``, in the ``folder`` of its model."""
    kept = {flag: attrgetter(flag)(args) for flag in (*_KEPT, AGENT)}
    (folder / FILE).write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", "utf-8")


def kept_prompts(folder: Path) -> dict[str, Any]:
    """Return the settings of prompts with which the model in ``folder`` was trained, by flag; empty without a file.

    Raises:
        UsageError: the file cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        kept = json.loads(path.read_text("utf-8"))
        found = {flag: kept[flag] for flag in _KEPT} | {AGENT: kept.get(AGENT)}
        template_variables(found["data.chat_template_kwargs"])
        if not isinstance(found[AGENT], str | None):
            raise TypeError(f"{AGENT} is not a path")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read ({error}); remove it, and give the prompt settings as flags."
        ) from error
    return found


def filled(flags: dict[str, Any], kept: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in ``flags`` that were not given, and so are None, with the settings of a model's training."""
    kept = {flag: kept.get(flag) for flag in _KEPT if flag != "rollout.temperature"}
    if flags["data.apply_chat_template"] is not None or flags["data.input_template"]:
        kept |= dict.fromkeys(("data.apply_chat_template", "data.input_template"))  # one of them says how
    taken = {flag: value for flag, value in kept.items() if flags[flag] is None and value not in (None, False, "")}
    if not (flags["data.apply_chat_template"] or taken.get("data.apply_chat_template")):
        taken = {flag: value for flag, value in taken.items() if flag not in NONE}
    return flags | taken | {"data.apply_chat_template": bool({**flags, **taken}["data.apply_chat_template"])}
