"""What is written as JSON is read as the same values, of the same types."""

import math
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from openrlhf_gtpo.platform.json_values import from_json, to_json

WHEN = datetime(2024, 2, 29, 1, 2, 3, 4)


@pytest.mark.parametrize(
    "value",
    [
        [None, True, 1, 10**20, -0.0, 1e-300, "é", []],
        {"a": {"b": [1]}, "": {}},
        {1: "a", (2, None): "b", "dict": [["a", 1]], "bytes": "00"},
        (1, [2, (3,)]),
        {1, "a"},
        frozenset({(1, 2)}),
        b"\x00\xff",
        [WHEN, WHEN.replace(tzinfo=UTC), WHEN.date(), WHEN.time()],
        timedelta(days=-1, microseconds=7),
        Decimal("1.10"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_come_back_as_they_are(value: Any) -> None:
    again = from_json(to_json(value))
    assert repr(again) == repr(value) or again == value
    assert type(again) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        np.float32(0.1),
        np.float64(math.nan),
        np.int64(-3),
        np.bool_(True),
        np.str_("a"),
        np.bytes_(b"\xff"),
        np.datetime64("2024-02-29T01:02:03.123456789"),
        np.timedelta64("NaT"),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array([]),
    ],
    ids=repr,
)
def test_values_of_numpy_come_back_as_they_are(value: Any) -> None:
    [again] = from_json(to_json([value]))
    assert type(again) is type(value) and again.dtype == value.dtype
    np.testing.assert_array_equal(again, value)


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_numbers_that_are_not_finite_come_back(number: float) -> None:
    assert repr(from_json(to_json({"x": number}))) == repr({"x": number})


def test_an_earlier_versions_text_is_json() -> None:
    assert from_json(b'[["a", {"dict": 1}, NaN]]')[0][:2] == ["a", {"dict": 1}]
    assert [date.min, time.max] == from_json(to_json([date.min, time.max]))
