"""Command lines: parse, check, call, print. This file holds their shared parts."""

import argparse
import io
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from openrlhf_gtpo.errors import TrainingStopped, UsageError, with_near_flag
from openrlhf_gtpo.platform.processes import LaunchError, ProcessFailed, is_first_process

_KEY = "WANDB_API_KEY"
_KEY_FLAG = r"(--logger\.wandb\.ke?y?[=\s\0]['\"]?)(?!--)([^\s\0'\"]+)"  # argparse accepts abbreviated flags too


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter that wraps descriptions by paragraph, keeps indented blocks, and adds each flag's default,
    except for switches that are off and where the help already states it."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(block if block.startswith(" ") else fill(block, width, indent) for block in blocks)

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        silent = default in (None, "", [], argparse.SUPPRESS) or default is False or not action.option_strings
        return text if silent or "(default" in text else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """An argument parser that formats its help, and its subcommands' help, with :class:`HelpFormatter`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=HelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        super().error(with_near_flag(message, self._option_string_actions))

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Before Python 3.11.8 the value of --flag=-- is an empty list: https://github.com/python/cpython/issues/109475
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)


def exit_status(
    command: str, run: Callable[[], Any], *mistakes: type[Exception], interrupted: str = "interrupted."
) -> int:
    """Call ``run`` and return an exit status: 0; 2 for a user error; 1 if training or a process failed; 130 after
    Ctrl-C; 141 if nobody reads stdout any more, as after `| head`. 1, 2 and 130 come with one sentence on stderr.

    Args:
        command: name to print before the sentence.
        mistakes: exceptions that count as user errors, besides :class:`UsageError` and :class:`LaunchError`.
        interrupted: the sentence to print after Ctrl-C.
    """
    reported: tuple[type[Exception], ...] = (UsageError, LaunchError, TrainingStopped, ProcessFailed, *mistakes)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal or pipe that cannot print × or ±
    try:
        run()
        if sys.stdout is not None:  # a shell may have closed it
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        if is_first_process():
            print(f"{command}: {interrupted}", file=sys.stderr)
        return 128 + signal.SIGINT
    except reported as error:
        if is_first_process():
            print(f"{command}: {error}", file=sys.stderr)
        return 1 if isinstance(error, TrainingStopped | ProcessFailed) else 2
    return 0


def hide_key() -> None:
    """If the command line has W&B's key, move the key to WANDB_API_KEY and restart this process with that name
    instead. Call this before the slow imports.

    A command line is visible in every user's ``ps``, in Ray's record of the job and in a benchmark's results. An
    environment is visible only to its own user. A new title (setproctitle) does not help: it is silently ignored once
    the environment's first variable has been rewritten, which any import may do.
    """
    command_line = "\0".join(sys.argv[1:])  # no argument has a \0, and --compare has flags within one
    keys = [key for _, key in re.findall(_KEY_FLAG, command_line) if key != _KEY]
    if keys:
        os.environ[_KEY] = keys[-1]
        words = re.sub(_KEY_FLAG, rf"\g<1>{_KEY}", command_line).split("\0")
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1 : -len(words)], *words])
