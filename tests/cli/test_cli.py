"""Every command line: its usage and its help."""

import argparse
import os
import subprocess
import sys
from importlib import import_module

import pytest

from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import TrainingStopped, UsageError


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "x: interrupted.\n"),
        (UsageError("no"), 2, "x: no\n"),
        (TrainingStopped("no"), 1, "x: no\n"),
        (OSError("no"), 2, "x: no\n"),
    ],
)
def test_how_a_command_ends(ends: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise ends

    assert exit_status("x", run, OSError) == status and capsys.readouterr().err == said


def test_a_terminal_without_a_sign_and_no_terminal_at_all() -> None:
    program = "from openrlhf_gtpo.cli import exit_status; raise SystemExit(exit_status('x', lambda: print('2 × 3')))"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", program], env=ascii_only, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "2 ? 3\n", "")
    closed = subprocess.run(["bash", "-c", f'{sys.executable} -c "{program}" >&-'], capture_output=True, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


def test_a_reader_may_stop_reading() -> None:
    """As in ``cli.plan … | head -1``."""
    program = (
        "from openrlhf_gtpo.cli import exit_status; raise SystemExit(exit_status('x', lambda: print(1), OSError))"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, b"")


COMMANDS = {
    "ask": [[]],
    "score": [[]],
    "plan": [[]],
    "report": [[], ["run"], ["compare"], ["watch"], ["fp8"]],
    "doctor": [[]],
    "view": [[]],
    "convert": [[], ["hf-to-megatron"], ["megatron-to-hf"]],
    "prepare": [[], ["smollm2"], ["tiny-model"], ["task"], ["math"]],
    "benchmark": [
        [],
        *([name] for name in ("overhead", "actor", "lm-head", "weight-sync", "layers", "train-step", "train")),
    ],
}
PARSERS = [(name, words) for name, commands in COMMANDS.items() for words in commands]


@pytest.mark.parametrize(
    "name, words", PARSERS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_a_usage_and_a_help(name: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main = import_module(f"openrlhf_gtpo.cli.{name}").main
    for mistake in (["--no-such-flag"], *([] if words or name == "doctor" else [[]])):
        with pytest.raises(SystemExit) as ended:
            main([*words, *mistake])
        printed = capsys.readouterr()
        assert ended.value.code == 2 and not printed.out
        assert printed.err.startswith("usage: ") and printed.err.count("error: ") == 1
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out


def test_two_dashes_are_a_value() -> None:
    """Even where Python makes an empty list of them."""
    parser = Parser()
    parser.add_argument("--name")
    parser.add_argument("--number", type=int)
    parser.add_argument("--one-of", choices=["a"])
    assert parser.parse_args(["--name=--"]).name == "--"
    for words in (["--number=--"], ["--one-of=--"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)


def test_every_default_is_in_the_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for switches that are off, and for what may be left out (an output, a text)."""
    seen: list[argparse.Action] = []
    add = argparse._ActionsContainer._add_action

    def note(self: argparse._ActionsContainer, action: argparse.Action) -> argparse.Action:
        seen.append(action)
        return add(self, action)

    monkeypatch.setattr(argparse._ActionsContainer, "_add_action", note)
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            import_module(f"openrlhf_gtpo.cli.{name}").main(["--help"])
    formatter = Parser()._get_formatter()
    valued = [one for one in seen if one.option_strings and one.default not in (None, "", [], argparse.SUPPRESS)]
    assert len(valued) > 80
    for action in valued:
        if action.default is not False:
            assert action.help and "(default: " in formatter._get_help_string(action), action.option_strings
