"""Lossless conversion of values to JSON and back, with types that JSON lacks: bytes, dates, sets, NumPy's and others.

An object in the text has one key, the type of its value: ``{"bytes": "00ff"}``, ``{"dict": [["a", 1]]}``.
"""

import json
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

_MARK = b"#"  # no JSON begins with this; text without it is an earlier version's plain JSON

# By exact type: its name, its encoder, and its decoder.
_KINDS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    dict: ("dict", lambda value: [[key, part] for key, part in value.items()], dict),
    tuple: ("tuple", list, tuple),
    set: ("set", list, set),
    frozenset: ("frozenset", list, frozenset),
    bytes: ("bytes", bytes.hex, bytes.fromhex),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("date", date.isoformat, date.fromisoformat),
    time: ("time", time.isoformat, time.fromisoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds], lambda n: timedelta(*n)),
    Decimal: ("decimal", str, Decimal),
}
_MADE_OF = {name: back for name, _, back in _KINDS.values()}
_MADE_OF["numpy"] = lambda parts: np.array(parts[1], dtype=parts[0])[()]
_NUMPY_KINDS = "biufSUmM"  # bools, numbers, texts, times


def to_json(value: Any) -> bytes:
    """Encode ``value`` as text, from which :func:`from_json` restores the same value and types.

    Raises:
        TypeError: a part of it has an unsupported type; the message names it.
    """
    return _MARK + json.dumps(_encoded(value)).encode()


def from_json(text: bytes) -> Any:
    """Decode the text of :func:`to_json`, or JSON."""
    return _decoded(json.loads(text[len(_MARK) :])) if text.startswith(_MARK) else json.loads(text)


def _encoded(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(part) for part in value]
    if kind in _KINDS:
        name, parts_of, _ = _KINDS[kind]
        return {name: _encoded(parts_of(value))}
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in _NUMPY_KINDS:
        return {"numpy": [value.dtype.str, _encoded(value.tolist())]}
    raise TypeError(f"Object of type {kind.__module__}.{kind.__qualname__} is not serializable")  # json's own words


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if isinstance(value, dict):
        [(name, parts)] = value.items()
        return _MADE_OF[name](_decoded(parts))
    return value
