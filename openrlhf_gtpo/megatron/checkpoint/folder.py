"""A folder of checkpoints: one becomes visible whole or not at all, ``latest`` names the last, old ones go.

Every function here is for one process at a time, the first rank's or the driver's; it knows neither torch nor megatron.
"""

import math
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any

from openrlhf_gtpo.megatron.checkpoint.files import (
    MANIFEST,
    CheckpointError,
    check_checkpoint,
    read_manifest,
    sync_folder,
)

LATEST = "latest"
_BEST = "best"  # what OpenRLHF's tags of best checkpoints begin with
_UNFINISHED = re.compile(r"(?P<tag>.+)\.tmp-[0-9a-f]{8}")
_REPLACED = ".replaced"


def check_tag(tag: str) -> None:
    """Raises CheckpointError where ``tag`` cannot name a checkpoint."""
    if not re.fullmatch(r"\w[\w.+=-]*", tag) or _UNFINISHED.fullmatch(tag) or tag.endswith(_REPLACED) or tag == LATEST:
        raise CheckpointError(f"{tag!r} cannot name a checkpoint; use letters, digits, '_', '-' and '.'.")


def latest(folder: str | Path) -> str | None:
    """The tag of the last checkpoint that was written whole; None where there is none.

    Raises:
        CheckpointError: the folder's ``latest`` names a checkpoint that is not there.
    """
    folder = Path(folder)
    try:
        tag = (folder / LATEST).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return None
    if not _is_checkpoint(locate(folder, tag)):
        there = ", ".join(path.name for path in _checkpoints(folder))
        hint = f"write the name of one that is ({there}) into {folder / LATEST}" if there else "there is none at all"
        raise CheckpointError(f"{folder / LATEST} names {tag!r}, which is not a checkpoint there; {hint}.")
    return tag


def locate(folder: str | Path, tag: str) -> Path:
    """Where the checkpoint ``tag`` is, which one that was being replaced in a crash is beside its place."""
    path = Path(folder) / tag
    replaced = path.with_name(path.name + _REPLACED)
    return replaced if not path.exists() and _is_checkpoint(replaced) else path


def check_latest(folder: str | Path, hf_config: Any, *, dtype: str) -> str | None:
    """The tag of the latest checkpoint, which training of the model can go on from; None where there is none.

    For the driver, before any engine starts. See ``checkpoint_files.check_checkpoint``.

    Raises:
        CheckpointError: it cannot go on from that one.
    """
    tag = latest(folder)
    if tag is not None:
        check_checkpoint(locate(folder, tag), hf_config, dtype=dtype, for_training=True)
    return tag


def resolve(path: str | Path) -> Path:
    """The checkpoint that ``path`` is, or the latest one of the folder of checkpoints that it is.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if path.is_dir() and not _is_checkpoint(path):
        tag = latest(path)
        if tag is not None:
            return locate(path, tag)
    read_manifest(path)
    return path


def begin(target: Path, *, whole_folder: bool) -> Path:
    """A new empty folder to write the checkpoint ``target`` into, with the leftovers of crashed writes cleared away.

    Args:
        whole_folder: the folder of ``target`` belongs to checkpoints alone, so any leftover in it may go; otherwise
            those of ``target`` itself.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(target.parent.iterdir()):
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished and path.is_dir() and (whole_folder or unfinished["tag"] == target.name):
            shutil.rmtree(path)
        elif path.name.endswith(_REPLACED) and _is_checkpoint(path) and whole_folder:
            _end_replacement(path)
    temporary = _unfinished(target)
    temporary.mkdir()
    return temporary


def publish(temporary: Path, target: Path) -> None:
    """Give what is complete in ``temporary`` its name; a checkpoint of that name is replaced."""
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        if _is_checkpoint(target):
            target.rename(replaced)
        else:
            target.rmdir()  # an empty folder; anything else is not ours to remove
    temporary.rename(target)
    sync_folder(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def set_latest(folder: Path, tag: str) -> None:
    """Let ``latest`` name ``tag``, at once or not at all."""
    temporary = folder / f".{LATEST}.tmp"
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(tag + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(folder / LATEST)
    sync_folder(folder)


def rotate(folder: Path, kept: str, *, max_num: int, max_mem_gb: float) -> list[str]:
    """Remove what is too much, as OpenRLHF does: what has no metric first, then the worst metric, then the oldest.

    At most ``max_num`` checkpoints and ``max_mem_gb`` (2^30 bytes) stay. Tags that begin with "best" do not count as
    checkpoints and are not removed, except earlier ones where ``kept`` is a new best. ``kept`` always stays.

    Returns:
        the removed tags.
    """
    removed = []
    everything = _checkpoints(folder)
    if kept.startswith(_BEST):
        for path in [path for path in everything if path.name.startswith(_BEST) and path.name != kept]:
            removed.append(_remove(path))
    regular = [path for path in everything if not path.name.startswith(_BEST)]
    candidates = sorted((path for path in regular if path.name != kept), key=_worth)
    for path in candidates:
        too_many = len(regular) > max_num
        if not too_many and _bytes(folder) <= max_mem_gb * 2**30:
            break
        removed.append(_remove(path))
        regular.remove(path)
    return removed


def _worth(path: Path) -> tuple[bool, float, float]:
    metric = _metric(path)
    return metric is not None, float("-inf") if metric is None else metric, path.stat().st_mtime


def _metric(path: Path) -> float | None:
    try:
        value = float(read_manifest(path)["metric"]["value"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return None
    return None if math.isnan(value) else value


def _checkpoints(folder: Path) -> list[Path]:
    """Complete ones alone, so that whatever else a user keeps in the folder is left alone."""
    return sorted(
        path
        for path in folder.iterdir()
        if _is_checkpoint(path) and not path.name.endswith(_REPLACED) and not _UNFINISHED.fullmatch(path.name)
    )


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _bytes(folder: Path) -> int:
    return sum(
        (Path(where) / name).stat().st_size
        for path in _checkpoints(folder)
        for where, _, names in os.walk(path)
        for name in names
    )


def _remove(path: Path) -> str:
    # Under this name the next write clears it away, should this end in the middle.
    unfinished = _unfinished(path)
    path.rename(unfinished)
    shutil.rmtree(unfinished)
    return path.name


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def _end_replacement(replaced: Path) -> None:
    """A crash left an earlier checkpoint beside its place: it goes back there, unless its successor has come."""
    target = replaced.with_name(replaced.name.removesuffix(_REPLACED))
    if target.exists():
        shutil.rmtree(replaced)
    else:
        replaced.rename(target)
