"""Declarations of this package's flags: each one once, with its default, help, range, and when a run reads it.

The parser, the check of ranges, the warning about flags without effect and ``docs/flags.md`` come from these
declarations. Features declare flags in their folders; ``flags.py`` lists all of them.
"""

import argparse
import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments

Values = Mapping[str, Any]  # a parsed command line by flag, without the two dashes; None is a flag without a value

# Rules of ``rules.py``: one before OpenRLHF's block, which also gets the flags on the command line, and one after it,
# which returns changed values by flag. Both raise UsageError for a contradiction.
Before = Callable[[dict[str, Any], frozenset[str]], None]
After = Callable[[Arguments], Mapping[str, Any]]


@dataclass(frozen=True)
class Need:
    """A condition for a run to read a setting.

    Fields:
        holds: True if a run with these values meets it.
        otherwise: why the setting has no effect if not; {0[a.flag]} stands for the value of --a.flag.
    """

    holds: Callable[[Values], object]
    otherwise: str


def needs_flag(flag: str) -> Need:
    """Return the need for ``flag``, with a value other than None, 0, False and ''."""
    return Need(lambda values: values[flag], f"needs --{flag}")


SAMPLES = Need(lambda values: values["rollout.is_sampled"], "a replay's rows come with prompts and rewards")


@dataclass(frozen=True)
class Bounds:
    """The range of a setting's numbers, without NaN, and without infinity unless ``or_infinite``."""

    at_least: float = -math.inf
    above: float = -math.inf
    at_most: float = math.inf
    below: float = math.inf
    or_infinite: bool = False

    def check(self, flag: str, value: Any) -> None:
        """Raise UsageError unless ``value``, one number or several, is within the bounds; None always passes."""
        numbers = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(map(self._allow, numbers)):
            got = " ".join(f"{number:.10g}" for number in numbers)
            finite = "" if self.or_infinite or all(map(math.isfinite, numbers)) else "a finite "
            raise UsageError(f"Expected {finite}{self.of(f'--{flag}')}, got {got}.")

    def of(self, name: str) -> str:
        """Write the range as text, such as ``0 <= NAME < 1``."""
        low, high = (
            next(((sign, bound) for sign, bound in pair if math.isfinite(bound)), None)
            for pair in ((("<=", self.at_least), ("<", self.above)), (("<=", self.at_most), ("<", self.below)))
        )
        if low and high:
            return f"{low[1]:g} {low[0]} {name} {high[0]} {high[1]:g}"
        if low:
            return f"{name} {low[0].replace('<', '>')} {low[1]:g}"
        return f"{name} {high[0]} {high[1]:g}" if high else name

    def _allow(self, number: float) -> bool:
        if not math.isfinite(number):
            return self.or_infinite and number == math.inf
        return self.at_least <= number <= self.at_most and self.above < number < self.below


@dataclass(frozen=True)
class Setting:
    """One flag of this package.

    Fields:
        flag: its name without the two dashes.
        default: its default. A bool makes a switch, --FLAG and --no-FLAG; a list, a flag that may be repeated.
        help: what it does, in at most 30 words, for --help and docs/flags.md.
        type: converts a word to its value; None takes the type of the default, or str.
        bounds: range of a number.
        needs: conditions for a run to read it; otherwise the run reports that the flag has no effect.
        page: page in ``docs`` with more about it.
    """

    flag: str
    default: Any
    help: str
    type: Callable[[str], Any] | None = None
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    bounds: Bounds | None = None
    needs: tuple[Need, ...] = ()
    page: str | None = None

    def add_to(self, group: argparse._ActionsContainer) -> None:
        """Add the flag to a parser or a group of one."""
        options: dict[str, Any] = {"default": self.default, "help": self.help.replace("%", "%%")}
        if isinstance(self.default, bool):
            options |= {"action": argparse.BooleanOptionalAction}
        elif isinstance(self.default, list):
            options |= {"action": "append", "metavar": self.metavar}
        elif self.choices:
            options |= {"choices": self.choices}
        else:
            kind = self.type or (str if self.default is None else type(self.default))
            options |= {"type": kind, "metavar": self.metavar}
        group.add_argument(f"--{self.flag}", **options)


@dataclass(frozen=True)
class Ignored:
    """Other flags, mostly OpenRLHF's, that have no effect with these settings.

    Fields:
        flags: names or patterns, such as "vllm.*".
        need: condition for a run to read them.
    """

    flags: tuple[str, ...]
    need: Need


@dataclass(frozen=True)
class Group:
    """Settings under one heading.

    Fields:
        title: the heading.
        about: their purpose, in one clause.
        settings: settings in the order of --help.
        needs: conditions for a run to read any of them.
        ignored: other flags without effect with these settings.
        page: page in ``docs`` with more about them.
    """

    title: str
    about: str
    settings: tuple[Setting, ...]
    needs: tuple[Need, ...] = ()
    ignored: tuple[Ignored, ...] = ()
    page: str | None = None

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add the settings to a parser, under their heading."""
        group = parser.add_argument_group(f"openrlhf_gtpo {self.title}", self.about)
        for setting in self.settings:
            setting.add_to(group)


def settings_of(config: type, prefix: str, without: Iterable[str] = ()) -> tuple[Setting, ...]:
    """Make flags ``--{prefix}FIELD`` from an algorithm's dataclass of settings (``algorithms.config.setting``), which
    checks their ranges itself; leave out the fields ``without``."""
    types, settings = typing.get_type_hints(config), []
    for field in dataclasses.fields(config):
        if field.name in without:
            continue
        kind, help, readers = types[field.name], field.metadata["help"], field.metadata["variants"]
        variant_needs: tuple[Need, ...] = ()
        if readers:
            help += f" (read by {', '.join(readers)})"
            noun, verb = ("variant", "reads") if len(readers) == 1 else ("variants", "read")
            otherwise = f"only {noun} {' and '.join(readers)} {verb} it"
            variant_needs = (_needs_variant(prefix, readers, otherwise),)
        choices = typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else None
        settings.append(Setting(prefix + field.name, field.default, help, kind, choices, needs=variant_needs))
    return tuple(settings)


def _needs_variant(prefix: str, readers: tuple[str, ...], otherwise: str) -> Need:
    return Need(lambda values: values[f"{prefix}variant"] in readers, otherwise)
