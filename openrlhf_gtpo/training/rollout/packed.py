"""Rows as one tensor of bytes, for a checkpoint, which loads only tensors and plain values. Upstream prints what it
loads, and a tensor prints in few words."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from openrlhf_gtpo.platform.json_values import from_json, to_json
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.rows import Row

# A row's values per token (21 bytes, and its routes as they are), and its values per row.
_COLUMNS: dict[str, Any] = {"tokens": np.int32, "mask": np.bool_, "log_probs": np.float32, "versions": np.int32}
_COLUMNS |= {"routes": None}
_COLUMNS |= {f"values.{name}": np.float32 for name in TokenValues._fields}
_ONCE = (
    "prompt",
    "label",
    "number",
    "reward",
    "score",
    "truncated",
    "logs",
    "texts",
    "off_policy",
    "weight",
    "metrics",
)


def pack(rows: Sequence[Row]) -> torch.Tensor:
    """Pack ``rows`` into (n,) uint8, a NumPy archive: each column of their tokens, row after row, and the rest by
    :func:`to_json`, which may raise TypeError."""
    assert not any(row.images or row.image_inputs for row in rows), "checkpoints cannot hold images"
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _COLUMNS}
    rest = []
    for row in rows:
        present = []
        for name, column in _columns(row).items():
            if column is not None:
                columns[name].append(np.asarray(column, dtype=_COLUMNS[name]))
                present.append(name)
        dtype = None if row.reward_dtype is None else str(row.reward_dtype).removeprefix("torch.")
        own = {name: getattr(row, name) for name in _ONCE}
        rest.append(own | {"reward_dtype": dtype, "length": len(row.tokens), "columns": present})
    arrays = {name: np.concatenate(parts) for name, parts in columns.items() if parts}
    file = io.BytesIO()
    np.savez(file, rest=np.frombuffer(to_json(rest), np.uint8), **arrays)
    return torch.frombuffer(bytearray(file.getbuffer()), dtype=torch.uint8)


def unpack(packed: torch.Tensor) -> list[Row]:
    """Unpack the rows that :func:`pack` was given."""
    rows, place = [], dict.fromkeys(_COLUMNS, 0)
    with np.load(io.BytesIO(packed.numpy().tobytes()), allow_pickle=False) as archive:
        arrays = dict(archive)
    for own in from_json(arrays["rest"].tobytes()):
        length, dtype, columns = own.pop("length"), own.pop("reward_dtype"), {}
        for name in own.pop("columns"):
            columns[name] = arrays[name][place[name] : place[name] + length]
            place[name] += length
        values = [columns.pop(f"values.{name}", None) for name in TokenValues._fields]
        columns["tokens"] = columns["tokens"].astype(np.int64)
        row: dict[str, Any] = {"log_probs": None, "versions": None, "routes": None} | own | columns
        row["values"] = None if values[0] is None else TokenValues(*values)
        row["reward_dtype"] = None if dtype is None else getattr(torch, dtype)
        rows.append(Row(**row))
    return rows


def pack_json(value: Any) -> torch.Tensor:
    """Pack ``value`` into (n,) uint8 by :func:`to_json`, which may raise TypeError."""
    return torch.frombuffer(bytearray(to_json(value)), dtype=torch.uint8)


def unpack_json(packed: torch.Tensor) -> Any:
    """Unpack the value that :func:`pack_json` was given."""
    return from_json(packed.numpy().tobytes())


def _columns(row: Row) -> dict[str, Any]:
    values = (None, None) if row.values is None else row.values
    tokens = (row.tokens, row.mask, row.log_probs, row.versions, row.routes)
    return dict(zip(_COLUMNS, (*tokens, *values), strict=True))
