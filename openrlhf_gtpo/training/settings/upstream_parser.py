"""Upstream's own command line with our flags added; no code is copied.

OpenRLHF 0.11.2 builds its parser, post-processes the arguments and trains inside ``if __name__ == "__main__"``
(https://github.com/OpenRLHF/OpenRLHF/blob/main/openrlhf/cli/train_ppo_ray.py). Here that block is cut out of the
installed source and runs with two names replaced: ``argparse`` has our parser, and ``train`` only keeps the arguments.
All of this can go once upstream has a function that parses.
"""

import argparse
import ast
import functools
import re
import sys
from collections.abc import Sequence
from datetime import datetime
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

from openrlhf_gtpo.errors import UsageError, with_near_flag
from openrlhf_gtpo.training.settings import flags, rules
from openrlhf_gtpo.training.settings.guard import source_path
from openrlhf_gtpo.training.settings.values import check_values

MODULE = "openrlhf.cli.train_ppo_ray"


class _Help(argparse.HelpFormatter):
    """Help with every flag's default, and the last part of its name as a placeholder for its value."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return action.dest.rpartition(".")[2].upper()

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default is argparse.SUPPRESS or "(default" in text:
            return text
        if isinstance(default, bool):
            default = "on" if default else "off"
        values = default if isinstance(default, list | tuple) else [default]
        shown = " ".join(str(value) for value in values if value is not None) or "none"
        return f"{text} (default: {shown})".lstrip()


class ExtendedParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` for ``argv`` that adds this package's flags just before parsing, and applies its rules. It
    adds the flags in ``argv`` to ``given``."""

    def __init__(self, argv: Sequence[str], given: set[str], **kwargs: Any) -> None:
        program = "python3 -m openrlhf_gtpo.cli.train_ppo_ray"
        super().__init__(prog=program, usage="%(prog)s --flag VALUE ...", formatter_class=_Help, **kwargs)
        # 0.1 spelled it so.
        self._argv = [re.sub(r"^(--algo\.\w+)\.normalise_over\b", r"\1.normalize_over", word) for word in argv]
        self._given = given
        self._upstream_flags: frozenset[str] = frozenset()

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        self._upstream_flags = frozenset(self._option_string_actions)
        self._optionals.title = "OpenRLHF's own"
        flags.add_flags(self)
        self._action_groups.sort(key=lambda group: group is self._optionals)  # OpenRLHF's many come last
        parsed = super().parse_args(self._argv)
        self._given |= self._find_given()
        rules.complete(vars(parsed), frozenset(self._given))
        check_values(vars(parsed))
        return parsed

    def _get_option_tuples(self, option_string: str) -> list:
        """Return the flags that an abbreviation may mean. What is unambiguous upstream stays so with our flags."""
        matches = super()._get_option_tuples(option_string)
        return [match for match in matches if match[1] in self._upstream_flags] or matches

    def _find_given(self) -> frozenset[str]:
        """Return the destinations on the command line, by a second parse: it changes exactly these."""
        untouched: list[str] = []  # a list, so that a repeatable flag can add to a copy of it
        destinations = {action.dest for action in self._actions}
        namespace, _ = self.parse_known_args(self._argv, argparse.Namespace(**dict.fromkeys(destinations, untouched)))
        return frozenset(d for d in destinations if getattr(namespace, d) is not untouched)

    def error(self, message: str) -> NoReturn:
        if "unrecognized" in message and "_steps" in message:
            message += (
                ": the number of steps follows from the number of prompts; set --data.max_samples, "
                "--train.num_episodes and --rollout.batch_size"
            )
        raise UsageError(with_near_flag(message, self._option_string_actions))


def parse(argv: Sequence[str], given: set[str] | None = None) -> SimpleNamespace:
    """Parse ``argv`` into upstream's arguments and ours, post-processed by upstream, as the nested namespace it trains
    with.

    Args:
        given: gets the flags in ``argv``.

    Raises:
        UsageError: a flag or value that upstream or ``flags`` refuses.
        SystemExit: after ``--help``.
    """
    parsed: list[SimpleNamespace] = []
    extended = {
        **vars(argparse),
        "ArgumentParser": functools.partial(ExtendedParser, argv, set() if given is None else given),
    }
    namespace = {
        "argparse": SimpleNamespace(**extended),
        "datetime": datetime,
        "train": parsed.append,
        "print": functools.partial(print, file=sys.stderr),
    }
    try:
        exec(main_block(), namespace)
    except AssertionError as error:  # one of upstream's own checks
        raise UsageError(str(error)) from error
    return parsed[0]


@functools.cache
def main_block() -> CodeType:
    """Compile the code under upstream's ``if __name__ == "__main__"``, with upstream's file name."""
    path = source_path(MODULE)
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            return compile(ast.Module(node.body, type_ignores=[]), str(path), "exec")
    raise UsageError(f"{MODULE} has no __main__ block; install an OpenRLHF that openrlhf_gtpo supports.")
