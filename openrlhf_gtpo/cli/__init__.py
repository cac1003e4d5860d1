"""Command lines: parse, check, call, print. Here is what they share."""

import argparse
import os
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError


class HelpFormatter(argparse.HelpFormatter):
    """Adds a flag's default to its help, where it has one that the help does not speak of and that is no switch's."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        silent = default in (None, "", [], argparse.SUPPRESS) or default is False or not action.option_strings
        return text if silent or "(default" in text else f"{text} (default: %(default)s)"


class RawHelpFormatter(HelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The same, with the description as it is written."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose commands' helps have defaults too."""

    def __init__(self, *, formatter_class: Any = HelpFormatter, **options: Any) -> None:
        super().__init__(formatter_class=formatter_class, **options)


def check_output(flag: str, path: Path | None, *sources: Path) -> None:
    """Refuse, before any work, a file to write that cannot be written, or that is one of ``sources``, which are read.

    Raises:
        UsageError: what is wrong with ``path``.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{flag} {path} is a folder; name a file in it.")
    there = next(part for part in (path, *path.parents) if os.path.exists(part))
    if there == path and not path.is_file():  # such as /dev/null, which a command may replace
        raise UsageError(f"{flag} {path} is not a regular file; name another.")
    if there == path and any(os.path.exists(source) and path.samefile(source) for source in sources):
        raise UsageError(f"{flag} {path} is the input, which would be lost; name another file.")
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise UsageError(f"{flag} {path} cannot be written, because of {there}; name another file.")
