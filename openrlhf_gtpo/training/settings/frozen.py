"""Conversion of OpenRLHF's mutable namespace to frozen :class:`Arguments`, and back."""

import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, TypeVar

from openrlhf_gtpo.training.arguments import Arguments

_Section = TypeVar("_Section")


def freeze(namespace: SimpleNamespace) -> Arguments:
    """Freeze the arguments in a nested ``namespace``, lists as tuples."""
    return _frozen(Arguments, namespace)


def _frozen(kind: type[_Section], namespace: SimpleNamespace) -> _Section:
    kinds = {field.name: field.type for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    values = {
        name: _frozen(kinds[name], value) if isinstance(value, SimpleNamespace) else _kept(value)  # type: ignore
        for name, value in vars(namespace).items()
    }
    return kind(**values)


def _kept(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def thaw(arguments: Any) -> SimpleNamespace:
    """Turn ``arguments``, or one of their sections, into OpenRLHF's namespace; tuples as lists."""
    values = {}
    for name, value in vars(arguments).items():
        if type(value).__module__ == Arguments.__module__:
            value = thaw(value)
        values[name] = list(value) if type(value) is tuple else value
    return SimpleNamespace(**values)


def by_flag(arguments: Any, prefix: str = "") -> dict[str, Any]:
    """Return the values of ``arguments``, or of one of their sections, by flag."""
    values: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        is_section = type(value).__module__ == Arguments.__module__
        values |= by_flag(value, f"{prefix}{name}.") if is_section else {prefix + name: value}
    return values


def changed(arguments: _Section, changes: Mapping[str, Any]) -> _Section:
    """Return a copy of ``arguments`` with changed values, by flag."""
    for flag, value in changes.items():
        name, _, rest = flag.partition(".")
        value = changed(getattr(arguments, name), {rest: value}) if rest else _kept(value)
        arguments = dataclasses.replace(arguments, **{name: value})  # type: ignore[type-var]
    return arguments
