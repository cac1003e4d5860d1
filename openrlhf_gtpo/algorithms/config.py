"""The base of all settings of estimators and surrogates, and the checks that reject invalid values. Uses no
tensors."""

import dataclasses
import math
import typing
from typing import Any, Literal

Mean = Literal["arithmetic", "geometric"]
NormalizeOver = Literal["zero_filled", "polarity"]
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


def setting(default: Any, help: str, *, variants: tuple[str, ...] = (), **bounds: float) -> Any:
    """Declare a field of :class:`Settings`: its default, its help on the command line, and where it applies.

    Args:
        variants: the values of ``variant`` under which the field is read; () for all of them.
        bounds: the bounds of a number, as for :func:`check_number`.
    """
    return dataclasses.field(default=default, metadata={"help": help, "variants": variants, "bounds": bounds})


class Settings:
    """Base class for dataclasses of settings. Rejects a field that is out of range.

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
                check_number(field.name, value, **field.metadata.get("bounds", {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingConfig(Settings):
    """The settings that GTPO and GRPO-S share."""

    variant: str
    success_threshold: float = setting(1.0, "responses whose outcome reaches this form O+, the others O-")
    entropy_mean: Mean = "arithmetic"
    normalize_over: NormalizeOver = setting(
        "zero_filled",
        "what O+ and O- are each normalized over: all rows, with zeros for the other set, or the rows of the set",
        variants=("v2", "v3"),
    )
    scope: Scope = setting("group", "normalize over a group or over the whole batch")
    shape_uniform_groups: bool = setting(
        False, "keep the advantages of groups whose responses all succeed or all fail"
    )
    entropy_eps: float = setting(1e-6, "smallest entropy, in nats; lower ones are raised to it", above=0)

    @property
    def two_sets(self) -> bool:
        """True if O+ and O- are normalized as two sets (Eq. 14, 15, 19) instead of one (Eq. 3, 8)."""
        return self.variant in ("v2", "v3")
