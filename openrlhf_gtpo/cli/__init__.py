"""Command lines: parse, check, call, print. Here is what they share."""

import argparse
from typing import Any


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
