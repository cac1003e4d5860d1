"""What a user reads when a run is refused or ends: whole sentences, which say what they are about. Tests of refusals
check which flags are named."""

import ast
import re

import pytest

from tests.support import ROOT

ERRORS = ("UsageError", "TrainingStopped", "Restartable")
SOURCES = [path for folder in ("openrlhf_gtpo", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]


def text(node: ast.expr) -> str | None:
    """The text of an expression, with {} for each value in it; None if it is not written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def messages() -> list[tuple[str, str]]:
    """Where, and what, of every message that is written where it is raised."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ERRORS and node.args:
                words = text(node.args[0])
                if words is not None:
                    found.append((f"{path.relative_to(ROOT)}:{node.lineno}", words))
    return found


def faults(message: str) -> str:
    """What is wrong with a message, or nothing. One that begins in lower case may be a clause of a longer one."""
    if "\n" in message or "  " in message or message != message.strip():
        return "one line, with single blanks"
    return "" if re.search(r"([.?]|\{\})$", message) or message[0].islower() else "a sentence has an end"


def test_every_message_is_a_sentence_on_one_line() -> None:
    assert len(messages()) > 150
    assert {where: faults(message) for where, message in messages() if faults(message)} == {}


def test_every_refusal_names_a_flag_a_file_or_a_value() -> None:
    """What the user has given, so that they need not guess which of it is meant."""
    unnamed = r"Ray did not start|Give --"
    wanted = r"--\w|\{\}|\w+\.\w+|[A-Z]{4}"
    assert not [where for where, message in messages() if not re.search(f"{wanted}|{unnamed}|^[a-z]+ ", message)]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("--a {} is too large; give {}.", ""),
        ("it returned {}, not a dict", ""),
        ("Expected --a >= 1", "a sentence has an end"),
        ("--a  is wrong.", "one line, with single blanks"),
        ("--a\nis wrong.", "one line, with single blanks"),
    ],
)
def test_a_fault_is_seen(message: str, fault: str) -> None:
    assert faults(message) == fault
