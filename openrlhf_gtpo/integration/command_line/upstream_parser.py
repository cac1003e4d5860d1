"""Upstream's own command line, run as it is, with flags of ours added to it. Nothing of it is copied.

OpenRLHF builds its parser, post-processes the arguments and trains inside ``if __name__ == "__main__"``. That block is
taken out of the installed source and executed with two names of its module replaced: ``argparse`` by a view of the
real one whose parser is ours, and ``train`` by a function that keeps the arguments.
"""

import argparse
import ast
import difflib
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime
from types import CodeType, SimpleNamespace
from typing import Any, NoReturn

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.integration.command_line.guard import source_path

MODULE = "openrlhf.cli.train_ppo_ray"

AddFlags = Callable[[argparse.ArgumentParser], None]
Adjust = Callable[[argparse.Namespace, frozenset[str]], None]


class ExtendedParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that adds flags just before it parses and may adjust what was parsed.

    Args:
        argv: the command line, without the program's name.
        add_flags: adds flags to the parser that upstream has filled.
        adjust: gets the flat namespace and the destinations that the user set on the command line.
    """

    def __init__(self, argv: Sequence[str], add_flags: AddFlags, adjust: Adjust, **kwargs: Any) -> None:
        super().__init__(prog="python3 -m openrlhf_gtpo.cli.train_ppo_ray", **kwargs)
        self._argv = list(argv)
        self._upstream_flags: frozenset[str] = frozenset()
        self._add_flags = add_flags
        self._adjust = adjust

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        self._upstream_flags = frozenset(self._option_string_actions)
        self._add_flags(self)
        parsed, unknown = self.parse_known_args(self._argv)
        if unknown:
            self._refuse_unknown(unknown)
        self._adjust(parsed, self._given())
        return parsed

    def _get_option_tuples(self, option_string: str) -> list:
        """What an abbreviated flag may mean. One that is clear upstream stays clear beside our flags."""
        matches = super()._get_option_tuples(option_string)
        return [match for match in matches if match[1] in self._upstream_flags] or matches

    def _given(self) -> frozenset[str]:
        """Destinations that appear on the command line: those that a second parse does not leave untouched."""
        untouched: list[str] = []  # a list, so that a repeatable flag can add to a copy of it
        destinations = {action.dest for action in self._actions}
        namespace, _ = self.parse_known_args(self._argv, argparse.Namespace(**dict.fromkeys(destinations, untouched)))
        return frozenset(d for d in destinations if getattr(namespace, d) is not untouched)

    def _refuse_unknown(self, unknown: list[str]) -> NoReturn:
        flag = next((word.split("=")[0] for word in unknown if word.startswith("-")), None)
        if flag is None:
            raise UsageError(f"{unknown[0]!r} belongs to no flag; every argument is --flag VALUE.")
        nearest = difflib.get_close_matches(flag, self._option_string_actions, n=1, cutoff=0.5)
        hint = f"; did you mean {nearest[0]}?" if nearest else "; --help lists the known ones."
        raise UsageError(f"unknown flag {flag}{hint}")

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parse(argv: Sequence[str], add_flags: AddFlags, adjust: Adjust) -> SimpleNamespace:
    """Upstream's arguments for ``argv``, post-processed by upstream, as the nested namespace that it trains with.

    Raises:
        UsageError: a flag or value that upstream, ``add_flags`` or ``adjust`` refuses.
        SystemExit: after ``--help``.
    """
    kept: list[SimpleNamespace] = []
    parser_view = SimpleNamespace(
        **{
            **vars(argparse),
            "ArgumentParser": lambda **kwargs: ExtendedParser(argv, add_flags, adjust, **kwargs),
        }
    )
    namespace = {"argparse": parser_view, "datetime": datetime, "train": kept.append, "print": _print_to_stderr}
    try:
        exec(main_block(), namespace)
    except Exception as error:
        if isinstance(error, UsageError) or not _raised_by_upstream_block(error):
            raise
        raise UsageError(_refusal(error)) from error
    return kept[0]


def main_block() -> CodeType:
    """The code under upstream's ``if __name__ == "__main__"``, compiled with upstream's file name."""
    path = source_path(MODULE)
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test).replace('"', "'") == "__name__ == '__main__'":
            return compile(ast.Module(node.body, type_ignores=[]), str(path), "exec")
    raise UsageError(f"{MODULE} has no __main__ block; this OpenRLHF is not one that openrlhf_gtpo knows.")


def _raised_by_upstream_block(error: BaseException) -> bool:
    """Whether upstream's own checks of its arguments raised this, not something deeper down."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return last.filename == str(source_path(MODULE))


def _refusal(error: Exception) -> str:
    """Upstream's assertions explain themselves; where it trips over a missing or odd value, its source line does."""
    if isinstance(error, AssertionError) and str(error):
        return str(error)
    line = traceback.extract_tb(error.__traceback__)[-1].line
    return f"OpenRLHF cannot work with these arguments: {type(error).__name__}: {error}, at `{line}`."


def _print_to_stderr(*values: object) -> None:
    print(*values, file=sys.stderr)
