"""Command lines as upstream parses them and as this package parses them, and values for their flags."""

import argparse
import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from openrlhf_gtpo.training.settings import flags, upstream_parser

# The least that upstream accepts: its default estimator (gae) needs a reward model as critic, or a remote reward.
BASE = ("--reward.remote_url", "reward.py", "--vllm.num_engines", "1")

ROWS = [{"question": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(4)]


class FixedClock(datetime):
    """A clock that stands still: upstream's default run name has the minute in it, which could pass between parses."""

    @classmethod
    def now(cls, tz: Any = None) -> datetime:
        return cls(2026, 1, 2, 3, 4)


class Refused(Exception):
    """Raised for a command line that does not get as far as training."""


@contextmanager
def fake_modelscope() -> Iterator[None]:
    """Provide what ``--use_ms`` imports and calls: it is not installed, and would patch the hub for all tests."""
    module = types.ModuleType("modelscope.utils.hf_util")
    module.patch_hub = lambda: None  # type: ignore[attr-defined]
    names = ("modelscope", "modelscope.utils", "modelscope.utils.hf_util")
    sys.modules.update(dict.fromkeys(names, module))
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def upstream(argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that upstream trains with, from its own main block and real argparse; ``train`` is replaced."""
    kept: list[SimpleNamespace] = []
    namespace = {"argparse": argparse, "datetime": FixedClock, "train": kept.append, "print": lambda *values: None}
    with mock.patch.object(sys, "argv", ["train_ppo_ray", *argv]), fake_modelscope():
        try:
            exec(upstream_parser.main_block(), namespace)
        except (Exception, SystemExit) as error:
            raise Refused(repr(error)) from error
    return flatten(kept[0])


def ours(argv: Sequence[str]) -> dict[str, Any]:
    """The arguments that this package trains with."""
    with mock.patch.object(upstream_parser, "datetime", FixedClock), fake_modelscope():
        try:
            return flatten(upstream_parser.parse(argv))
        except upstream_parser.UsageError as error:
            raise Refused(str(error)) from error


def flatten(namespace: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten a nested namespace, as ``by_flag`` does frozen arguments."""
    flat: dict[str, Any] = {}
    for name, value in vars(namespace).items():
        if isinstance(value, SimpleNamespace):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def outcome(parse: Any, argv: Sequence[str]) -> dict[str, Any] | str:
    """The arguments, or "refused"."""
    try:
        return parse(argv)
    except Refused:
        return "refused"


def parser(extended: bool) -> argparse.ArgumentParser:
    """Upstream's parser with its flags and, if ``extended``, with this package's too."""
    kept: list[argparse.ArgumentParser] = []

    class Recorder(argparse.ArgumentParser):
        def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
            kept.append(self)
            raise Refused

    view = SimpleNamespace(**{**vars(argparse), "ArgumentParser": Recorder})
    try:
        exec(upstream_parser.main_block(), {"argparse": view, "datetime": FixedClock})
    except Refused:
        pass
    if extended:
        flags.add_flags(kept[0])
    return kept[0]


def argv_of(command: Mapping[str, Any]) -> list[str]:
    """The words of a command line given as flag -> value: True gives the flag alone, None leaves it out."""
    argv: list[str] = []
    for flag, value in command.items():
        if value is not None:
            argv += [flag] if value is True else [flag, *map(str, value if isinstance(value, list) else [value])]
    return argv


def value_flags(filled: argparse.ArgumentParser) -> list[argparse.Action]:
    """Every action but ``--help``."""
    return [action for action in filled._actions if not isinstance(action, argparse._HelpAction)]


def words(action: argparse.Action, flag: str) -> list[str]:
    """``flag`` with valid values that differ from its default, as its choices, type and nargs require."""
    if action.nargs == 0:
        return [flag]
    if action.choices is not None:
        values = [str(choice) for choice in action.choices if choice != action.default]
    elif action.type is int:
        values = ["3", "5"]
    elif action.type is float:
        values = ["0.375", "0.75"]
    elif action.dest == "data.input_template":
        values = ["alpha {}"]
    else:
        values = ["alpha", "beta"]
    count = action.nargs if isinstance(action.nargs, int) else 2 if action.nargs in ("*", "+") else 1
    return [flag, *values[:count]]


def table(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write ``rows`` to ``path`` as a data set of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def assert_names(sentence: str, names: str) -> None:
    """Check that a refusal names all of ``names``: flags, or words of a rule that has none. Its form is checked by
    the fixture ``refused``, for all of them."""
    assert all(name in sentence for name in names.split()), sentence
