"""What follows from the declaration of a setting: its flag, its range and the need for what reads it."""

import argparse
import math
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.settings.setting import Bounds, Group, Setting, needs_flag


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused", "rule"),
    [
        (Bounds(at_least=1), [1, 10**9], [0, -1, math.inf, math.nan], "x >= 1"),
        (Bounds(above=0), [1e-9], [0.0, -1.0], "x > 0"),
        (Bounds(at_most=2), [2, -5], [2.1], "x <= 2"),
        (Bounds(at_least=0, below=1), [0.0, 0.99], [1.0, -0.1, math.nan], "0 <= x < 1"),
        (Bounds(above=0, at_most=1), [1.0], [0.0, 1.5], "0 < x <= 1"),
        (Bounds(at_least=0, or_infinite=True), [0.0, math.inf, [0.5, math.inf]], [-math.inf, math.nan], "x >= 0"),
    ],
)
def test_a_range_is_what_it_says(bounds: Bounds, allowed: list[Any], refused: list[float], rule: str) -> None:
    assert bounds.of("x") == rule
    for value in (None, *allowed):
        bounds.check("x", value)
    for number in refused:
        for value in (number, [allowed[0] if isinstance(allowed[0], float) else 1.0, number]):
            with pytest.raises(UsageError, match=r"^Expected .*--x .*, got .*\.$"):
                bounds.check("x", value)


@pytest.mark.parametrize(
    ("setting", "words", "value"),
    [
        (Setting("a.x", 3, "3 %"), "--a.x 5", 5),
        (Setting("a.x", 0.5, "a float"), "--a.x 2", 2.0),
        (Setting("a.x", None, "a text"), "--a.x 2", "2"),
        (Setting("a.x", None, "a number", int), "--a.x 2", 2),
        (Setting("a.x", "b", "a choice", choices=("b", "c")), "--a.x c", "c"),
        (Setting("a.x", False, "a switch"), "--a.x", True),
        (Setting("a.x", True, "a switch"), "--no-a.x", False),
        (Setting("a.x", [], "several"), "--a.x 1 --a.x 2", ["1", "2"]),
    ],
)
def test_a_declaration_makes_a_flag(setting: Setting, words: str, value: Any) -> None:
    parser = argparse.ArgumentParser()
    Group("title", "what they are for", (setting,)).add_to(parser)
    assert vars(parser.parse_args([])) == {"a.x": setting.default}
    assert vars(parser.parse_args(words.split())) == {"a.x": value}
    assert setting.help in parser.format_help() and "openrlhf_gtpo title" in parser.format_help()


def test_a_need_for_a_flag_is_for_a_value() -> None:
    need = needs_flag("a.x")
    assert [bool(need.holds({"a.x": value})) for value in (None, 0, 0.0, "", False, 2, "b")] == [False] * 5 + [
        True
    ] * 2
