"""Types that settings of estimators share, and checks that refuse invalid values. Knows nothing about tensors."""

import dataclasses
import math
import typing
from typing import Any, Literal

Mean = Literal["arithmetic", "geometric"]
NormaliseOver = Literal["zero_filled", "polarity"]
Scope = Literal["group", "batch"]


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        allowed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name}={value!r} is not a known option; use one of {allowed}.")


def check_number(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    at_least: float = -math.inf,
    at_most: float = math.inf,
) -> None:
    """Raise ValueError unless ``value`` is a finite real number within the bounds."""
    bounds = ((">", above), (">=", at_least), ("<=", at_most))
    rules = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if math.isfinite(bound))
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not (is_number and above < value and at_least <= value <= at_most):  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is out of range; use a finite number {rules}".rstrip() + ".")


def number(default: float, **bounds: float) -> Any:
    """A field of :class:`Settings` with the bounds of :func:`check_number`."""
    return dataclasses.field(default=default, metadata=bounds)


class Settings:
    """Base class for dataclasses of settings, which refuses a field that is out of range.

    Raises:
        ValueError: a ``float`` that is out of bounds or not finite, or an invalid value of a ``Literal`` or ``bool``.
    """

    def __post_init__(self: Any) -> None:
        types = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            kind, value = types[field.name], getattr(self, field.name)
            if typing.get_origin(kind) is Literal:
                check_choice(field.name, value, typing.get_args(kind))
            elif kind is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False.")
            elif kind is float:
                check_number(field.name, value, **field.metadata)
