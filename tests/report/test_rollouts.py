"""Rollout dumps: what is written is read back, whole or not at all, and a file that is not a dump is named."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from openrlhf_gtpo.report import rollouts
from openrlhf_gtpo.report.rollouts import Tokens, dump_file, find_dumps, read_dump, write_dump

COLUMNS: dict[str, Any] = {
    "row": [0, 1],
    "group": [0, 0],
    "prompt": ["<|user|>學\n", ""],
    "outcome": [0.1, 1.0],
    "length_penalty": [0.0, -0.5],
    "truncated": [True, False],
    "guided": [False, True],
    "prompt_tokens": [[5], []],
    "tokens": [[1, 2, 3], []],
    "pieces": [["<script>", "", "x"], []],
    "mask": [[True, False, True], []],
    "log_probs": [[-0.1, 0.0, -30.0], []],
    "rollout_log_probs": None,
    "entropy": [[1e-7, 0.0, 11.9], []],
    "advantages": [[0.5, 0.0, -0.25], []],
    "versions": None,
    "ratio": [[1.0, 1.0, 1.5], []],
    "clipped": [[False, False, True], []],
    "texts": ['{"parsed": "4"}', "{}"],
}
SETTINGS = {"step": 7, "estimator": "gtpo", "config": {"alpha2": 0.1}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = dump_file(tmp_path / "rollouts", 7)
    write_dump(path, SETTINGS, COLUMNS)
    dump = read_dump(path)
    assert dump.step == 7 and dump.settings == {"version": 6, **SETTINGS}
    for field in rollouts.SCHEMA:
        read, written = dump.columns[field.name], COLUMNS[field.name]
        if written is None:
            assert read is None
        elif isinstance(read, Tokens):
            rows = [read.values[start:end].tolist() for start, end in zip(read.offsets, read.offsets[1:])]
            kind = np.float32 if pa.types.is_float32(field.type.value_type) else object
            assert rows == [np.array(row, kind).tolist() for row in written]
        else:
            assert list(read) == written
    assert [file.name for file in path.parent.iterdir()] == ["step_000007.parquet"]


def test_a_killed_writer_leaves_the_dump_before_it_or_none(tmp_path: Path) -> None:
    """The process dies just before it renames the complete file: it leaves nothing that a reader takes for a dump."""
    program = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom openrlhf_gtpo.report import rollouts\n"
        "os.fsync = lambda file: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"rollouts.write_dump(Path(sys.argv[1]), {SETTINGS!r}, {COLUMNS!r})"
    )
    path = dump_file(tmp_path, 7)
    killed = subprocess.run([sys.executable, "-c", program, str(path)], cwd=Path(rollouts.__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".step") and left.stat().st_size > 1000
    with pytest.raises(ValueError, match="has no step_"):
        find_dumps(tmp_path)


def test_a_dump_that_cannot_be_written_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dump_file(tmp_path, 7)
    write_dump(path, SETTINGS, COLUMNS)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_dump(path, SETTINGS | {"seed": 2}, COLUMNS)
    assert list(tmp_path.iterdir()) == [path] and "seed" not in read_dump(path).settings


def test_dumps_are_found_by_step_anywhere_in_a_run(tmp_path: Path) -> None:
    for step in (10, 9):
        write_dump(dump_file(tmp_path / "checkpoints" / "rollouts", step), SETTINGS, COLUMNS)
    assert [path.name for path in find_dumps(tmp_path)] == ["step_000009.parquet", "step_000010.parquet"]
    assert find_dumps(find_dumps(tmp_path)[0]) == find_dumps(tmp_path)[:1]
    write_dump(dump_file(tmp_path / "other" / "rollouts", 10), SETTINGS, COLUMNS)
    with pytest.raises(ValueError, match="found the same step twice: .*checkpoints.* and .*other/.*; name one run"):
        find_dumps(tmp_path)
    with pytest.raises(ValueError, match="nothing does not exist"):
        find_dumps(tmp_path / "nothing")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dump_file(tmp_path, 7)
    monkeypatch.setattr(rollouts, "VERSION", 7)
    write_dump(path, SETTINGS | {"openrlhf_gtpo": "9.1"}, COLUMNS)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="of version 7, but this package reads versions 1 to 6; open it with .* 9.1"):
        read_dump(path)
