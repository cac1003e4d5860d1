"""The order of the rules: once one has read a value, no later one writes it."""

import dataclasses
import json
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform import PLATFORM_VARIABLE
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.features.sampler_entropy import source
from openrlhf_gtpo.training.settings import rules
from openrlhf_gtpo.training.settings.frozen import changed
from tests.training.settings.test_command_lines import BASE_WORDS, FILE, a_host  # noqa: F401  # a fixture

# What a later rule writes all the same, and why that is right.
EXCEPT = {
    "actor.num_gpus_per_node": "a host without GPUs has fewer processes of the reference with adapters, too",
    "train.replay_rollouts": "the folder becomes absolute; what has read it asked whether there is one",
    "vllm.gpu_memory_utilization": "a host without GPUs has a limit, which holds for the guide's copy, too",
}


class Recorded(dict):
    """Values that note which of them a rule reads and writes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.read: set[str] = set()
        self.written: set[str] = set()

    def __getitem__(self, flag: str) -> Any:
        self.read.add(flag)
        return super().__getitem__(flag)

    def __setitem__(self, flag: str, value: Any) -> None:
        self.written.add(flag)
        super().__setitem__(flag, value)

    def update(self, changes: Mapping[str, Any]) -> None:  # type: ignore[override]
        for flag, value in changes.items():
            self[flag] = value

    def __ior__(self, changes: Mapping[str, Any]) -> "Recorded":  # type: ignore[override, misc]
        self.update(changes)
        return self


def recorded(section: Any, read: set[str], prefix: str = "") -> Any:
    """Arguments, or a section of them, that note what is read."""
    names = {field.name for field in dataclasses.fields(section)}

    class Section(type(section)):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            value = super().__getattribute__(name)
            if name in names and not dataclasses.is_dataclass(value):
                read.add(prefix + name)
            return value

    made = object.__new__(Section)
    for name, value in vars(section).items():
        is_section = type(value).__module__ == Arguments.__module__
        vars(made)[name] = recorded(value, read, f"{prefix}{name}.") if is_section else value
    return made


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.usefixtures("a_host")
def test_no_rule_writes_what_an_earlier_one_has_read(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: dict[str, set[str]] = defaultdict(set)
    wrong: set[tuple[str, str, str]] = set()

    def note(rule: Callable[..., Any], read: set[str], written: set[str]) -> None:
        earlier = [other for other in reads if other != rule.__name__]
        wrong.update((rule.__name__, flag, other) for other in earlier for flag in written & reads[other])
        reads[rule.__name__] |= read

    def before(rule: rules.Before) -> rules.Before:
        def apply(values: dict[str, Any], given: frozenset[str]) -> None:
            own = Recorded(values)
            rule(own, given)
            note(rule, own.read, own.written)
            values.update(own.items())

        return apply

    def after(rule: rules.After) -> rules.After:
        def apply(args: Arguments) -> Mapping[str, Any]:
            read: set[str] = set()
            monkeypatch.setattr(source, "changed", lambda _, changes: recorded(changed(args, changes), read))
            changes = rule(recorded(args, read))
            note(rule, read, {flag for flag, value in changes.items() if changed(args, {flag: value}) != args})
            return changes

        return apply

    monkeypatch.setenv(PLATFORM_VARIABLE, platform)
    of_before, of_after = [*map(before, rules.before())], [*map(after, rules.after())]
    monkeypatch.setattr(rules, "before", lambda: of_before)
    monkeypatch.setattr(rules, "after", lambda: of_after)
    for line in FILE.read_text().splitlines():
        reads.clear()
        try:
            run.parse(shlex.split(json.loads(line)["words"].replace("BASE", BASE_WORDS)))
        except UsageError:
            continue
    assert {(rule, flag, other) for rule, flag, other in wrong if flag not in EXCEPT} == set()
    assert platform == "cuda" or {flag for _, flag, _ in wrong} == set(EXCEPT)
