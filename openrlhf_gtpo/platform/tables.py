"""Readers of JSON and CSV rows that keep values as written. ``datasets`` would give each column one type: 3 beside 3.5
becomes 3.0, ISO dates ``datetime``, "007" becomes 7, and a message without a name gets the name None."""

import csv
import json
import re
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from openrlhf_gtpo.errors import UsageError

_BLANK, _DECODER = re.compile(r"\s*"), json.JSONDecoder()


def json_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON file, one after another or in a list, with the values of ``json``.

    Raises:
        UsageError: a row cannot be read. The message names its line or number.
    """
    with Path(path).open("rb") as file:
        values = chain.from_iterable(_values(line, number, file, path) for number, line in enumerate(file, 1))
        for number, row in enumerate(values, 1):
            if not isinstance(row, dict):
                problem = "null; drop it" if row is None else "not a JSON object; give one row per line"
                raise UsageError(f"{path}: row {number} is {problem}.")
            yield row


def csv_rows(path: str | Path, delimiter: str = ",") -> Iterator[dict[str, Any]]:
    """Yield the rows of a CSV file with a header, each cell as its text; None for an empty one.

    Raises:
        UsageError: a row cannot be read. The message names its line.
    """
    csv.field_size_limit(sys.maxsize)
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, delimiter=delimiter, strict=True)
        try:
            for row in rows:
                if None in row:
                    raise UsageError(f"{path}: line {rows.line_num} has more cells than the header; quote its commas.")
                yield {name: cell or None for name, cell in row.items()}
        except (csv.Error, UnicodeDecodeError) as error:
            raise UsageError(f"{path} cannot be read as csv after line {rows.line_num}: {error}.") from error


def _values(line: bytes, number: int, file: BinaryIO, path: str | Path) -> list[Any]:
    """Parse the JSON values of a line, or of the rest of the file if the line is not one value. Lists give their
    items."""
    encoding = "utf-8-sig" if number == 1 else "utf-8"
    values: list[Any] = []
    try:
        try:
            if line.strip():
                values = [json.loads(line.decode(encoding))]
        except json.JSONDecodeError:
            line += file.read()
            text, end = line.decode(encoding).rstrip(), 0
            while end < len(text):
                value, end = _DECODER.raw_decode(text, _BLANK.match(text, end).end())  # type: ignore[union-attr]
                values.append(value)
    except UnicodeDecodeError as error:
        number += line.count(b"\n", 0, error.start)
        raise UsageError(f"{path}: line {number} is not in UTF-8; convert it, for example with iconv.") from error
    except ValueError as error:
        number += getattr(error, "lineno", 1) - 1
        reason = getattr(error, "msg", error)  # no msg: a number with too many digits for Python
        raise UsageError(f"{path}: line {number} is not JSON ({reason}); give one row per line.") from error
    return [item for value in values for item in (value if isinstance(value, list) else [value])]
