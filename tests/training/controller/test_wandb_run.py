"""W&B gets one run, and each of its steps once, however often the run is started again."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from openrlhf_gtpo.training.controller.trackers import ResumedWandb
from openrlhf_gtpo.training.controller.wandb_run import WandbRun


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Logs to W&B as the controller's process does at its ``number``-th start."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in (
        ("MODE", "offline"),
        ("DIR", str(tmp_path)),
        ("SILENT", "true"),
        ("RUN_ID", ""),
        ("RESUME", ""),
    ):
        monkeypatch.setenv(f"WANDB_{name}", value)  # the last two are put back at the end

    def run(number: int, *logs: str) -> None:
        monkeypatch.delenv("WANDB_RUN_ID")
        monkeypatch.delenv("WANDB_RESUME")
        wandb.teardown()
        own = SimpleNamespace(key="0" * 40, org=None, project="tests", group=None, run_name="run")
        paths = SimpleNamespace(path=str(tmp_path))
        logger = ResumedWandb(SimpleNamespace(ckpt=paths, logger=SimpleNamespace(wandb=own)))
        for kind, step in map(str.split, logs):
            getattr(logger, f"log_{kind}")(int(step), {"start": float(number)})
        logger.close()
        wandb.teardown()

    return run


def records(log: bytes) -> Iterator[wandb_internal_pb2.Record]:
    """The records of an offline run's file: a LevelDB log, whose blocks have 32 KiB, with W&B's 7 bytes in front.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    place, data = 7, b""
    while place + 7 < len(log):
        length, kind = struct.unpack_from("<HB", log, place + 4)
        place += 7
        data += log[place : place + length]
        place += length
        if (left := -place % 2**15) < 7:
            place += left
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(data)
            data = b""


def read(folder: Path) -> dict[str, list[tuple[str, int, float]]]:
    """By the ids of the W&B runs under ``folder``: kind, step and start of what they were told."""
    told: dict[str, list[tuple[str, int, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        events = told.setdefault(path.stem.removeprefix("run-"), [])
        for record in records(path.read_bytes()):
            row = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            for kind in ("train", "eval"):
                if f"{kind}/global_step" in row:
                    step, start = (json.loads(row[f"{kind}/{name}"]) for name in ("global_step", "start"))
                    events.append((kind, step, start))
    return told


def test_a_run_that_is_started_again_stays_one_wandb_run_without_repeated_steps(
    tmp_path: Path, start: Callable[..., None]
) -> None:
    start(0, "eval 0", "train 1", "train 2", "eval 2", "train 3")
    start(1, "train 3", "eval 3", "train 4", "eval 4")
    [(first, told)] = read(tmp_path).items()
    assert told == [
        ("eval", 0, 0.0),
        *(("train", 1, 0.0), ("train", 2, 0.0), ("eval", 2, 0.0), ("train", 3, 0.0)),
        *(("eval", 3, 1.0), ("train", 4, 1.0), ("eval", 4, 1.0)),
    ]
    WandbRun(SimpleNamespace(ckpt=SimpleNamespace(path=str(tmp_path)))).forget()
    start(2, "train 1")
    others = {run: told for run, told in read(tmp_path).items() if run != first}
    assert [*others.values()] == [[("train", 1, 2.0)]]
