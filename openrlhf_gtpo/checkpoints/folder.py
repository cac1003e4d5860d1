"""A folder of checkpoints of either backend: written whole or not at all, found by looking at them, rotated.

A checkpoint is written under a temporary name, its manifest last, and then renamed: what a crash leaves behind is
never mistaken for one. ``latest`` names the last one for other tools; nothing here depends on it, except for
DeepSpeed's checkpoints of earlier versions of this package, which have no manifest. The driver uses this module before
any engine starts, so it imports neither torch nor megatron. Functions that write are for one process at a time, the
first rank's.
"""

import json
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from openrlhf_gtpo.checkpoints.files import (
    CheckpointError,
    DamagedError,
    Entry,
    check_file,
    describe,
    sync,
    write_text,
)

MANIFEST = "checkpoint.json"  # written last: a folder without it is not a checkpoint
TRAINING_STATE = "training_state.pt"
SIDE_FILES = "hf"  # the tokenizer, configuration and templates of the model, as Hugging Face stores them
LATEST = "latest"

FORMAT = 2
_DISTRIBUTIONS = ("openrlhf_gtpo", "openrlhf", "deepspeed", "megatron-core", "torch", "transformers")
_SHAPE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
)
_BEST = "best"  # OpenRLHF's prefix of best checkpoints' tags
_UNFINISHED = re.compile(r"(?P<tag>.+)\.tmp-[0-9a-f]{8}")
_REPLACED = ".replaced"
_DAMAGED = ".corrupt"


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; what was there before is unchanged."""


def newest_whole(*folders: str | Path) -> Path | None:
    """The checkpoint to go on from: the last one written to the first folder that is whole there and, under the same
    tag, in the others; None if there is none. Whole means that all files are there, in their sizes.

    If none with a manifest qualifies, the answer is the one of an earlier version that ``latest`` names.

    Raises:
        CheckpointError: a checkpoint was written by a later version.
    """
    for path in _checkpoints(*folders):
        with suppress(DamagedError):
            for folder in folders:
                _check_sizes(Path(folder, path.name))
            return path
    return _named_by_latest(folders[0])


def candidate(folders: Sequence[Path], tag: str | None = None) -> Path | None:
    """The checkpoint to try next: ``tag``, or else the newest, its files unchecked. None in folders without any, or if
    a run died while it saved its first one, so that only one folder has it.

    Raises:
        CheckpointError: a folder has no ``tag``, or not a whole one; or there are checkpoints, but none to go on from.
    """
    if tag is not None:
        for folder in folders:
            tags = names(folder)
            if tag not in tags:
                raise CheckpointError(f"{folder} has no checkpoint {tag!r}; it has {', '.join(tags) or 'none'}.")
            if _is_checkpoint(folder / tag):
                _check_sizes(folder / tag)
        return folders[0] / tag
    path = next(iter(_checkpoints(*folders)), None)
    if path is not None:
        with suppress(DamagedError):  # which the ranks find too
            read_manifest(path)  # raises if it is of a later version
        return path
    if len(folders) > 1 and all(folder.is_dir() for folder in folders) and sum(map(len, map(names, folders))) == 1:
        return None
    path, tags = _named_by_latest(folders[0]), names(folders[0])
    if path is None and (tags or (folders[0] / LATEST).exists()):
        others = ", ".join(tags) or f"what {LATEST} names is gone"
        shared = "".join(f" and that {folder} has too" for folder in folders[1:])
        raise CheckpointError(
            f"{folders[0]} has no checkpoint that is known to be whole{shared} ({others}); choose one with "
            "--ckpt.load_tag, or another folder to start anew."
        )
    return path


def announcement(path: Path) -> str:
    """The log line about the checkpoint that is loaded, with a warning if ``latest`` does not name it."""
    latest = path.with_name(LATEST)
    named = latest.is_file() and latest.read_text(encoding="utf-8", errors="replace").strip() == path.name
    warning = "" if named else f"Warning: {latest} does not name the checkpoint that is loaded. "
    unchecked = "" if _is_checkpoint(path) else ", of an earlier version, which left nothing to check it against"
    return f"{warning}Loading the checkpoint {path}{unchecked}"


def names(folder: Path) -> list[str]:
    """Names of everything that was once a checkpoint, including damaged ones and those that may not be whole."""
    return sorted(path.name for path in _folders(folder) if _is_checkpoint(path) or _is_unchecked(path))


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing mistakes it for a whole one or removes it; return its new path."""
    aside = path.with_name(path.name + _DAMAGED)
    while aside.exists():
        aside = aside.with_name(aside.name + _DAMAGED)
    path.rename(aside)
    return aside


def resolve(path: str | Path) -> Path:
    """The checkpoint at ``path``, or the newest whole one if ``path`` is a folder of checkpoints.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if path.is_dir() and not _is_checkpoint(path):
        path = newest_whole(path) or path
    read_manifest(path)
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """The checkpoint's manifest: what it says about itself.

    Raises:
        CheckpointError: the folder holds no checkpoint, or one that cannot be read.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint {folder}.")
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint of the Megatron actor: it has no {MANIFEST}.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format"], {name: dict(entry) for name, entry in dict(manifest["files"]).items()}
        if any(".." in Path(name).parts or Path(name).is_absolute() for name in files):
            raise ValueError("a file outside of the folder")
        manifest["files"] = files
        [int(entry["size"]) for entry in files.values()]
        if "model" in manifest:  # of the Megatron actor
            manifest["model"] = dict(manifest["model"])
            [manifest[name] for name in ("dtype", "optimizer")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{path} cannot be read ({type(error).__name__}); use another checkpoint.") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, and this version of openrlhf_gtpo reads format {FORMAT}; go "
            "on with the version that wrote it, or from another checkpoint."
        )
    return manifest


def check_checkpoint(
    folder: str | Path, hf_config: Any = None, *, dtype: str | None = None, for_training: bool = False
) -> dict[str, Any]:
    """Check that a checkpoint can be loaded by the Megatron actor, from its manifest and its files' sizes.

    Args:
        folder: of one checkpoint.
        hf_config: of the model to load it into; None accepts any.
        dtype: of that model's parameters, such as "bfloat16"; None accepts any.
        for_training: the optimizer's state is needed too.

    Returns:
        its manifest.

    Raises:
        CheckpointError: the first thing that is wrong, in one sentence.
    """
    folder = Path(folder)
    manifest = _check_sizes(folder)
    if "model" not in manifest:
        raise CheckpointError(f"{folder} is a checkpoint of the DeepSpeed actor, not of the Megatron actor.")
    if hf_config is not None:
        stored, expected = manifest["model"], describe_model(hf_config)
        differences = [
            f"{name} {stored.get(name)!r} and not {expected.get(name)!r}"
            for name in _SHAPE_FIELDS
            if stored.get(name) != expected.get(name)
        ]
        if differences:
            raise CheckpointError(f"{folder} is a checkpoint of another model: it has {', '.join(differences)}.")
    if dtype is not None and manifest["dtype"] != dtype:
        raise CheckpointError(
            f"{folder} was written in {manifest['dtype']} and this run is in {dtype}; run it in {manifest['dtype']}."
        )
    if for_training and not manifest["optimizer"]:
        raise CheckpointError(
            f"{folder} has weights and no optimizer state, so training cannot resume from it; start from its weights "
            "as a Hugging Face model (python3 -m openrlhf_gtpo.cli.convert megatron-to-hf)."
        )
    return manifest


def backend_of(path: Path) -> str:
    """The ``--actor.backend`` that wrote a checkpoint."""
    return "megatron" if _is_checkpoint(path) and "model" in read_manifest(path) else "deepspeed"


def describe_model(hf_config: Any) -> dict[str, Any]:
    """The Hugging Face configuration's fields that two models must share for the weights of one to fit the other."""
    described = {name: getattr(hf_config, name, None) for name in _SHAPE_FIELDS}
    heads = hf_config.num_attention_heads
    described["num_key_value_heads"] = described["num_key_value_heads"] or heads
    described["head_dim"] = described["head_dim"] or hf_config.hidden_size // heads
    return {name: value for name, value in described.items() if value is not None}


def begin(target: Path, *, whole_folder: bool) -> Path:
    """A new empty folder to write the checkpoint ``target`` into, with the leftovers of crashed writes cleared away.

    Args:
        whole_folder: the folder of ``target`` holds only checkpoints, so any leftover in it may go; otherwise only
            those of ``target`` itself may.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(target.parent.iterdir()):
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished and path.is_dir() and (whole_folder or unfinished["tag"] == target.name):
            shutil.rmtree(path)
        elif path.name.endswith(_REPLACED) and whole_folder and (_is_checkpoint(path) or _is_unchecked(path)):
            # A crash left an earlier checkpoint beside its place: it goes back, unless its successor is there.
            place = path.with_name(path.name.removesuffix(_REPLACED))
            if place.exists():
                _remove(path)
            else:
                path.rename(place)
    temporary = _unfinished(target)
    temporary.mkdir()
    return temporary


def missing_operation(parent: Path) -> str | None:
    """The first operation of a checkpoint that the existing folder ``parent`` refuses, as on many object stores and
    some network disks, with the reason: "rename a folder (Operation not supported)". None if it refuses none.

    Raises:
        OSError: not even a folder can be made in it.
    """
    place = Path(tempfile.mkdtemp(prefix=".try-", dir=parent))
    before, after = place / "before", place / "after"
    operations: dict[str, Callable[[], Any]] = {
        "make a folder": before.mkdir,
        "write and sync a file": lambda: write_text(before / LATEST, ""),
        "rename a folder": lambda: before.rename(after),
        "sync a folder": lambda: sync(place),
        "replace a file": lambda: set_latest(after, ""),
    }
    try:
        for name, attempt in operations.items():
            try:
                attempt()
            except OSError as error:
                return f"{name} ({error.strerror})"
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return None


def write_manifest(folder: Path, contents: dict[str, Any], known: dict[str, Entry] | None = None) -> None:
    """Write ``contents`` and a description of every file of ``folder``, which is then complete and on disk.

    Args:
        known: entries of files that their writers have described, by path in ``folder``; the others are read.
    """
    known = known or {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {name: known.get(name) or describe(folder / name) for name in (str(p.relative_to(folder)) for p in paths)}
    missing = sorted(known.keys() - files.keys())
    if missing:
        raise FileNotFoundError(f"{missing[0]}, which a rank has written, is not in {folder}")
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    # Later than the others, even if the clock has gone back or another node's is behind: order tells which is newest.
    others = (path.parent for path in folder.parent.glob(f"*/{MANIFEST}"))
    written = max([time.time(), *(_written(other) + 1e-3 for other in others)])
    described = {"format": FORMAT, "written": written, **contents, "versions": versions, "files": files}
    write_text(folder / MANIFEST, json.dumps(described, indent=1))
    for directory in {path.parent for path in paths} | {folder}:
        sync(directory)


def publish(temporary: Path, target: Path) -> None:
    """Give the complete checkpoint in ``temporary`` its name, replacing any checkpoint of that name."""
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        if _is_checkpoint(target) or _is_unchecked(target):
            target.rename(replaced)
        else:
            target.rmdir()  # an empty folder; anything else is not ours to remove
    temporary.rename(target)
    sync(target.parent)
    if replaced.exists():
        _remove(replaced)


def set_latest(folder: Path, tag: str) -> None:
    """Let ``latest`` name ``tag``, atomically."""
    temporary = folder / f".{LATEST}.tmp"
    write_text(temporary, tag + "\n")
    temporary.replace(folder / LATEST)
    sync(folder)


def rotate(folder: Path, kept: str, others: Sequence[Path] = (), *, max_num: int, max_mem_gb: float) -> list[str]:
    """Remove excess checkpoints, the oldest first. OpenRLHF goes by a metric first, but that metric is of an earlier
    step: it saves a step before it evaluates it (0.11.2, trainer/ppo_trainer.py, fit).

    At most ``max_num`` checkpoints and ``max_mem_gb`` (2^30 bytes) stay. Tags that begin with "best" do not count as
    checkpoints and are not removed, except earlier ones when ``kept`` is a new best. Two always stay: ``kept``, and
    the newest one whose tag is in ``others`` too: folders of checkpoints that are only useful together.

    Returns:
        the removed tags.
    """
    checkpoints = [folder / name for name in names(folder) if not name.endswith(_DAMAGED)]
    staying = {kept, *(path.name for path in _checkpoints(folder, *others)[:1])}
    best = [path for path in checkpoints if path.name.startswith(_BEST)]
    regular = [path for path in checkpoints if not path.name.startswith(_BEST)]
    removed = [path for path in best if path.name not in staying] if kept.startswith(_BEST) else []
    for path in removed:
        _remove(path)
    for path in sorted((path for path in regular if path.name not in staying), key=_written):
        if len(regular) <= max_num and sum(map(_bytes, regular + best)) <= max_mem_gb * 2**30:
            break
        _remove(path)
        removed.append(path)
        regular.remove(path)
    return [path.name for path in removed]


def _written(path: Path) -> float:
    """The time a checkpoint was written, in seconds. Without a manifest, it is the folder's, which a copy changes."""
    try:
        return float(read_manifest(path)["written"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return path.stat().st_mtime


def _checkpoints(first: str | Path, *others: str | Path) -> list[Path]:
    """The first folder's checkpoints whose tags the others have too, newest first; nothing else is checked."""
    candidates = [path for path in _folders(Path(first)) if _is_checkpoint(path) and not path.name.endswith(_DAMAGED)]
    shared = [path for path in candidates if all(_is_checkpoint(Path(other, path.name)) for other in others)]
    return sorted(shared, key=_written, reverse=True)


def _folders(folder: Path) -> list[Path]:
    """Folders that may be checkpoints; one set beside its place by a crash counts only if its place is empty."""
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [
        path
        for path in folders
        if not _UNFINISHED.fullmatch(path.name)
        and not (path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)) in folders)
    ]


def _named_by_latest(folder: str | Path) -> Path | None:
    """The DeepSpeed checkpoint of an earlier version, which wrote ``latest`` after it; None if there is none."""
    try:
        path = Path(folder, Path(folder, LATEST).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None
    return path if path in _folders(Path(folder)) and _is_unchecked(path) else None


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _is_unchecked(path: Path) -> bool:
    """True for DeepSpeed's files without a manifest: a checkpoint of an earlier version, perhaps not whole."""
    return not _is_checkpoint(path) and any(path.glob("*_states.pt"))


def _check_sizes(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        check_file(path, name, expected, checksum=False)
    return manifest


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _remove(path: Path) -> None:
    # Under this name, the next write clears it away if this ends in the middle.
    unfinished = _unfinished(path)
    path.rename(unfinished)
    shutil.rmtree(unfinished)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
