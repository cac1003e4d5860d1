"""What command lines mean: those of tests, presets and examples, with what ``parse`` and ``check_settings`` make of
them, on a host with GPUs and on one without.

``command_lines.jsonl`` has one on each line: its words, with BASE for ``BASE_WORDS``; the arguments that are neither
those of ``BASE_WORDS`` nor as they were given; the sentence that refuses it; and what is printed. Where a host without
GPUs has no entry, it is the same. Paths are made up, and nothing is there.
"""

import json
import os
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import PLATFORM_VARIABLE
from openrlhf_gtpo.training import host, run
from openrlhf_gtpo.training.checks.settings import check_settings
from openrlhf_gtpo.training.settings import upstream_parser
from openrlhf_gtpo.training.settings.frozen import by_flag
from tests.support.command_lines import BASE, FixedClock

FILE = Path(__file__).with_name("command_lines.jsonl")
BASE_WORDS = shlex.join((*BASE, "--data.prompt_dataset", "rows"))


@pytest.fixture
def a_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Two cores, all kernels, the same time of day, and an empty folder."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(host, "is_installed", lambda package: True)
    monkeypatch.setattr(upstream_parser, "datetime", FixedClock)
    monkeypatch.setenv("WANDB_API_KEY", "key")
    monkeypatch.chdir(tmp_path)
    yield


def meaning(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str, list[str]]:
    """The arguments of a command line by flag, in values for JSON; the sentence that refuses it, or ""; and the lines
    that are printed."""
    capsys.readouterr()
    values, refused = {}, ""
    try:
        args = run.parse(words)
        values = json.loads(json.dumps(by_flag(args), default=str))
        check_settings(args)
    except UsageError as error:
        refused = str(error)
    printed = capsys.readouterr()
    return values, refused, (printed.err + printed.out).splitlines()


def is_as_given(value: Any, flag: str, words: list[str]) -> bool:
    """Whether ``words`` end with the flag and its value, or have it before another flag."""
    parts = value if isinstance(value, list) else [] if value is True else [value]
    place = words.index(f"--{flag}") + 1 if f"--{flag}" in words else len(words)
    given = list(takewhile(lambda word: not word.startswith("--"), words[place:]))
    return place < len(words) + (value is True) and given == list(map(str, parts))


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.usefixtures("a_host")
def test_a_command_line_means_what_it_meant(
    platform: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To write the file anew, also with more words, set WRITE_COMMAND_LINES=1 in the environment of this test, and
    read the difference."""
    monkeypatch.setenv(PLATFORM_VARIABLE, platform)
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    defaults, _, usual = meaning(shlex.split(BASE_WORDS), capsys)
    found = []
    for line in lines:
        words = shlex.split(line["words"].replace("BASE", BASE_WORDS))
        values, refused, printed = meaning(words, capsys)
        values = {k: v for k, v in sorted(values.items()) if v != defaults[k] and not is_as_given(v, k, words)}
        shown = {"values": values, "refused": refused, "printed": [text for text in printed if text not in usual]}
        text = json.dumps({name: part for name, part in shown.items() if part})
        found.append(json.loads(text.replace(os.getcwd(), "HERE")))
    if os.environ.get("WRITE_COMMAND_LINES"):
        for line, now in zip(lines, found, strict=True):
            line.pop(platform, None)
            if now != line.get("cuda"):  # which comes first
                line[platform] = now
        FILE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    expected = [line.get(platform, line["cuda"]) for line in lines]
    wrong = [(line["words"], now, then) for line, now, then in zip(lines, found, expected, strict=True) if now != then]
    assert wrong == []
