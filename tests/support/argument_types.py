"""The text of ``openrlhf_gtpo/training/arguments.py``: every path of a parsed command line with its type."""

import argparse
import json
from collections.abc import Iterable, Mapping
from typing import Any

# What OpenRLHF's block or this package makes of a flag's value, or what no run is without.
OTHERWISE = {
    "actor.lora": '"LoraOptions | None"',
    "actor.eps_clip_low_high": "Sequence[float]",
    "actor.model_name_or_path": "str",
    "ckpt.save_steps": "float",
    "ds.lora.target_modules": "Sequence[str] | str",
    "eval.steps": "float",
    "reward.remote_url": "Sequence[str] | None",
    "rollout.forward_for": "str | None",
    "rollout.joined_by": "str | None",
    "rollout.vllm_generate_batch_size": "int",
    "vllm.num_engines": "int",
    "vllm.others": '"Sequence[EngineGroup]"',
}
_BEGINNING = '''"""The arguments of a run: OpenRLHF's flags and this package's, each at its path, typed, frozen.

Made of the parser's declarations by ``tests/support/argument_types.py`` (WRITE_FLAGS=1, see CONTRIBUTING.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openrlhf_gtpo.lora import LoraOptions
    from openrlhf_gtpo.training.host import EngineGroup
'''


def _type_of(action: argparse.Action) -> str:
    if action.nargs == 0 or isinstance(action.default, bool):
        return "bool"
    kind = {int: "int", float: "float"}.get(action.type, "str")  # type: ignore[call-overload]
    if kind == "int" and isinstance(action.default, float):
        kind = "float"
    if action.nargs is not None or isinstance(action.default, list):
        kind = f"Sequence[{kind}]"
    return kind if action.default is not None else f"{kind} | None"


def source(actions: Iterable[argparse.Action], own: Mapping[str, Any], derived: Mapping[str, Any]) -> str:
    """The module's text. A run without a feature is one with its defaults.

    Args:
        actions: of the parser that has all flags.
        own: the flags of this package, with their defaults.
        derived: what the arguments have besides, by path, likewise.
    """
    types = {flag: type(value).__name__ for flag, value in derived.items()}
    defaults = {flag: tuple(value) if isinstance(value, list) else value for flag, value in {**derived, **own}.items()}
    types |= {action.dest: _type_of(action) for action in actions} | OTHERWISE
    tree: dict[str, Any] = {}
    for flag in sorted(types):
        node, (*path, name) = tree, flag.split(".")
        for part in path:
            node = node.setdefault(part, {})
        default = defaults.get(flag, ...)
        shown = json.dumps(default) if isinstance(default, str) else repr(default)
        node[name] = types[flag] if default is ... else f"{types[flag]} = {shown}"
    classes: list[str] = []

    def add(title: str, node: dict[str, Any]) -> str:
        fields = [
            f"    {name}: {kind if isinstance(kind, str) else add(_titled(title, name), kind)}"
            for name, kind in node.items()
        ]
        classes.append(f"@dataclass(frozen=True, kw_only=True)\nclass {title}:\n" + "\n".join(fields) + "\n")
        return title + (f" = {title}()" if all(" = " in field for field in fields) else "")

    add("Arguments", tree)
    return "\n\n".join((_BEGINNING, *classes))


def _titled(outer: str, name: str) -> str:
    return ("" if outer == "Arguments" else outer) + name.title().replace("_", "")
