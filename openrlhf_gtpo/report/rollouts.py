"""Rollout dumps: one Parquet file per step, a row per response; the format, its writer and its reader.

docs/viewer.md describes each column. A list column has a value for each token of the response, from its first action
token to its last token. Tokens between two turns have ``mask`` False.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

VERSION = 6
# Version 1 lacks the settings that only a replay needs. Versions 1 and 2 lack ratios, 1 to 3 the guide, 1 to 4 the
# versions, 1 to 5 the texts.
_READ = (1, 2, 3, 4, 5, VERSION)
FOLDER = "rollouts"  # in --ckpt.path

_KEY = b"openrlhf_gtpo.rollouts"  # in the file's metadata: the settings as JSON
SCHEMA = pa.schema(
    [
        pa.field("row", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("outcome", pa.float64(), nullable=False),
        pa.field("length_penalty", pa.float64(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("guided", pa.bool_()),
        pa.field("prompt_tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("tokens", pa.list_(pa.int32()), nullable=False),
        pa.field("pieces", pa.list_(pa.string()), nullable=False),
        pa.field("mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("log_probs", pa.list_(pa.float32())),
        pa.field("rollout_log_probs", pa.list_(pa.float32())),
        pa.field("entropy", pa.list_(pa.float32())),
        pa.field("advantages", pa.list_(pa.float32()), nullable=False),
        pa.field("versions", pa.list_(pa.int32())),
        pa.field("ratio", pa.list_(pa.float32())),
        pa.field("clipped", pa.list_(pa.bool_())),
        pa.field("texts", pa.string()),
    ]
)


@dataclass(frozen=True)
class Tokens:
    """A list column: ``values`` (N,) of all rows in order; row i has ``offsets[i]`` to ``offsets[i + 1]``."""

    values: np.ndarray
    offsets: np.ndarray

    def rows(self) -> list[list[Any]]:
        """The values of each row."""
        return [part.tolist() for part in np.split(self.values, self.offsets[1:-1])]


@dataclass(frozen=True)
class RolloutDump:
    """A dump read from disk. Columns by name: arrays or lists of the rows' values, :class:`Tokens`, or None if the run
    did not record them."""

    path: Path
    settings: dict[str, Any]
    columns: dict[str, Any]

    @property
    def step(self) -> int:
        return self.settings["step"]


def dump_file(folder: Path, step: int) -> Path:
    return folder / f"step_{step:06d}.parquet"


def write_dump(path: Path, settings: Mapping[str, Any], columns: Mapping[str, Sequence[Any] | None]) -> None:
    """Write a dump to ``path`` atomically, and create its folder.

    Args:
        settings: ``step`` and the run's settings that a reader needs, as values for JSON.
        columns: the columns of ``SCHEMA``, with one value per row; None for one that the run does not record.
    """
    rows = len(next(values for values in columns.values() if values is not None))
    arrays = [
        pa.nulls(rows, field.type) if columns[field.name] is None else pa.array(columns[field.name], field.type)
        for field in SCHEMA
    ]
    metadata = {_KEY: json.dumps({"version": VERSION, **settings})}
    table = pa.Table.from_arrays(arrays, schema=SCHEMA.with_metadata(metadata))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")  # a killed run leaves this file; repeating the step replaces it
    try:
        with open(temporary, "wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def vocabulary_digest(tokenizer: Any) -> str:
    """Hash the tokens and ids of a Hugging Face tokenizer, or of a processor's tokenizer."""
    ids = getattr(tokenizer, "tokenizer", tokenizer).get_vocab()
    return hashlib.sha256(json.dumps(sorted(ids.items())).encode()).hexdigest()


def find_dumps(path: Path) -> list[Path]:
    """Return ``path`` itself if it is a file, else the dumps anywhere in it, by step.

    Raises:
        ValueError: there is none, or two dumps have the same step, as from two runs.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path} does not exist; give a dump or a run's folder.")
    files = sorted(path.rglob("step_*.parquet"), key=lambda file: file.name)
    if not files:
        raise ValueError(f"{path} has no step_*.parquet; train with --logger.dump_rollouts N to write them.")
    for first, second in pairwise(files):
        if first.name == second.name:
            raise ValueError(
                f"Expected one run in {path}, but found the same step twice: {first} and {second}; name one run."
            )
    return files


def read_settings(path: Path) -> dict[str, Any]:
    """Read only a dump's settings; raises like :func:`read_dump`."""
    with _whole(path):
        schema = pq.read_schema(path)
    return _settings(path, schema)


def read_dump(path: Path) -> RolloutDump:
    """Read a dump.

    Raises:
        ValueError: the file is truncated, not a dump, or a dump of another version.
    """
    with _whole(path):
        table = pq.ParquetFile(path).read()  # read_table would merge all dumps of a folder
    settings = _settings(path, table.schema)
    return RolloutDump(path, settings, {field.name: _column(table, field) for field in SCHEMA})


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name one of the dumps in its rollouts folder.")
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} is not a complete Parquet file ({reason}); write or copy it again.") from error


def _settings(path: Path, schema: pa.Schema) -> dict[str, Any]:
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise ValueError(f"{path} is not a rollout dump; name a file that --logger.dump_rollouts wrote.")
    settings: dict[str, Any] = json.loads(text)
    if settings["version"] not in _READ:
        raise ValueError(
            f"{path} is a rollout dump of version {settings['version']}, but this package reads versions "
            f"{_READ[0]} to {VERSION}; "
            f"open it with openrlhf_gtpo {settings.get('openrlhf_gtpo', 'of that version')}."
        )
    return settings


def _column(table: pa.Table, field: pa.Field) -> Any:
    if field.name not in table.column_names:  # written by an earlier version
        return None
    array = table[field.name].combine_chunks()
    if len(array) and array.null_count == len(array):
        return None
    if pa.types.is_string(field.type):
        return array.to_pylist()
    if not pa.types.is_list(field.type):
        return array.to_numpy(zero_copy_only=False)
    return Tokens(array.flatten().to_numpy(zero_copy_only=False), array.offsets.to_numpy())
