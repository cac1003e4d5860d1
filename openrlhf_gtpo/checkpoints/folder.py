"""A folder of checkpoints of either backend: writing them atomically, finding the newest whole one, and rotating them.

A checkpoint is written under a temporary name, its manifest last, and then renamed. The leftovers of a crash are
therefore never mistaken for a checkpoint. ``latest`` names the last one for other tools. Nothing here depends on it,
except for DeepSpeed's checkpoints of earlier versions of this package, which have no manifest. The driver uses this
module before any engine starts, so it imports neither torch nor megatron. Only one process at a time, the first rank,
may call the functions that write.
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
    """A checkpoint could not be written. Earlier files are unchanged."""


def newest_whole(*folders: str | Path) -> Path | None:
    """Return the checkpoint to resume from, or None. It is the last one written that is whole in the first folder and,
    under the same tag, in the others. Whole means that all files are there and have the right size.

    If none with a manifest qualifies, an earlier version's checkpoint counts, if ``latest`` names it.

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
    """Return the checkpoint to try next, with its files unchecked: ``tag``, or else the newest.

    None in folders without checkpoints, or if a run died during its first save, so that only one folder has it.

    Raises:
        CheckpointError: a folder has no whole ``tag``, or there are checkpoints but none can be resumed.
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
        with suppress(DamagedError):  # the ranks find it too
            read_manifest(path)  # raises if it is of a later version
        return path
    if len(folders) > 1 and all(folder.is_dir() for folder in folders) and sum(map(len, map(names, folders))) == 1:
        return None
    path, tags = _named_by_latest(folders[0]), names(folders[0])
    if path is None and (tags or (folders[0] / LATEST).exists()):
        others = ", ".join(tags) or f"the checkpoint that {LATEST} names is gone"
        shared = "".join(f" and that {folder} has too" for folder in folders[1:])
        raise CheckpointError(
            f"{folders[0]} has no checkpoint that is known to be whole{shared} ({others}); choose one with "
            "--ckpt.load_tag, or another folder to start anew."
        )
    return path


def announcement(path: Path) -> str:
    """Return the log line about the loaded checkpoint, with a warning if ``latest`` does not name it."""
    latest = path.with_name(LATEST)
    named = latest.is_file() and latest.read_text(encoding="utf-8", errors="replace").strip() == path.name
    warning = "" if named else f"Warning: {latest} does not name the checkpoint that is loaded. "
    unchecked = "" if _is_checkpoint(path) else " of an earlier version, which has no checksums to verify"
    return f"{warning}Loading the checkpoint {path}{unchecked}"


def names(folder: Path) -> list[str]:
    """List the names of all checkpoints, including damaged and perhaps incomplete ones."""
    return sorted(path.name for path in _folders(folder) if _is_checkpoint(path) or _is_unchecked(path))


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that nothing loads or removes it, and return its new path."""
    aside = path.with_name(path.name + _DAMAGED)
    while aside.exists():
        aside = aside.with_name(aside.name + _DAMAGED)
    path.rename(aside)
    return aside


def resolve(path: str | Path) -> Path:
    """Return the checkpoint at ``path``, or the newest whole one if ``path`` is a folder of checkpoints.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if path.is_dir() and not _is_checkpoint(path):
        path = newest_whole(path) or path
    read_manifest(path)
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the checkpoint's manifest.

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
            f"{folder} has checkpoint format {version}, and this version of openrlhf_gtpo reads format {FORMAT}; use "
            "the version that wrote it, or another checkpoint."
        )
    return manifest


def check_checkpoint(
    folder: str | Path, hf_config: Any = None, *, dtype: str | None = None, for_training: bool = False
) -> dict[str, Any]:
    """Check by manifest and file sizes that the Megatron actor can load a checkpoint.

    Args:
        folder: one checkpoint.
        hf_config: the configuration of the model to load it into; None accepts any.
        dtype: the dtype of that model's parameters, such as "bfloat16"; None accepts any.
        for_training: require the optimizer's state too.

    Returns:
        the checkpoint's manifest.

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
            f"{folder} has weights but no optimizer state, so training cannot resume from it; convert it to a "
            "Hugging Face model and start from that (python3 -m openrlhf_gtpo.cli.convert megatron-to-hf)."
        )
    return manifest


def backend_of(path: Path) -> str:
    """Return the ``--actor.backend`` that wrote a checkpoint."""
    return "megatron" if _is_checkpoint(path) and "model" in read_manifest(path) else "deepspeed"


def describe_model(hf_config: Any) -> dict[str, Any]:
    """Select the Hugging Face configuration's fields in which two models must agree to share weights."""
    described = {name: getattr(hf_config, name, None) for name in _SHAPE_FIELDS}
    heads = hf_config.num_attention_heads
    described["num_key_value_heads"] = described["num_key_value_heads"] or heads
    described["head_dim"] = described["head_dim"] or hf_config.hidden_size // heads
    return {name: value for name, value in described.items() if value is not None}


def begin(target: Path, *, whole_folder: bool) -> Path:
    """Remove the leftovers of crashed writes, and make a new folder to write the checkpoint ``target`` into.

    Args:
        whole_folder: the folder of ``target`` holds only checkpoints, so any leftover in it may go; otherwise only
            leftovers of ``target`` itself.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for path in sorted(target.parent.iterdir()):
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished and path.is_dir() and (whole_folder or unfinished["tag"] == target.name):
            shutil.rmtree(path)
        elif path.name.endswith(_REPLACED) and whole_folder and (_is_checkpoint(path) or _is_unchecked(path)):
            # A crash left an earlier checkpoint beside its place. Put it back, unless its successor is there.
            place = path.with_name(path.name.removesuffix(_REPLACED))
            if place.exists():
                _remove(path)
            else:
                path.rename(place)
    temporary = _unfinished(target)
    temporary.mkdir()
    return temporary


def missing_operation(parent: Path) -> str | None:
    """Try what a checkpoint needs in the existing folder ``parent``; return the first operation that fails, with the
    reason, such as "rename a folder (Operation not supported)", or None. Object stores and some network disks refuse
    some.

    Raises:
        OSError: no folder can be made in it.
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
    """Write ``contents`` and a description of every file of ``folder``, and sync it. The checkpoint is then complete.

    Args:
        known: entries that the writers of files have described, by path in ``folder``. The other files are read.
    """
    known = known or {}
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {name: known.get(name) or describe(folder / name) for name in (str(p.relative_to(folder)) for p in paths)}
    missing = sorted(known.keys() - files.keys())
    if missing:
        raise FileNotFoundError(f"a rank wrote {missing[0]}, but {folder} does not have it")
    versions = {}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    # Later than all others, even if a clock has gone back or another node's is behind: the times order checkpoints.
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
            target.rmdir()  # only removes an empty folder: anything else belongs to somebody else
    temporary.rename(target)
    sync(target.parent)
    if replaced.exists():
        _remove(replaced)


def set_latest(folder: Path, tag: str) -> None:
    """Make ``latest`` name ``tag``, atomically."""
    temporary = folder / f".{LATEST}.tmp"
    write_text(temporary, tag + "\n")
    temporary.replace(folder / LATEST)
    sync(folder)


def rotate(folder: Path, kept: str, others: Sequence[Path] = (), *, max_num: int, max_mem_gb: float) -> list[str]:
    """Remove excess checkpoints, the oldest first. OpenRLHF removes the one with the worst metric first, but it saves
    a step before evaluating it, so the metric is an earlier step's (0.11.2, trainer/ppo_trainer.py, fit).

    At most ``max_num`` checkpoints and ``max_mem_gb`` (2^30 bytes) stay. Tags that begin with "best" do not count and
    are not removed, except that a new best in ``kept`` replaces earlier ones. Two always stay: ``kept``, and the
    newest one whose tag is also in ``others``, the folders that hold the rest of the same checkpoints.

    Returns:
        The removed tags.
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
    """The time a checkpoint was written, in seconds. Without a manifest it is the folder's, which a copy changes."""
    try:
        return float(read_manifest(path)["written"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return path.stat().st_mtime


def _checkpoints(first: str | Path, *others: str | Path) -> list[Path]:
    """The first folder's checkpoints whose tags the other folders have too, newest first. Checks nothing else."""
    candidates = [path for path in _folders(Path(first)) if _is_checkpoint(path) and not path.name.endswith(_DAMAGED)]
    shared = [path for path in candidates if all(_is_checkpoint(Path(other, path.name)) for other in others)]
    return sorted(shared, key=_written, reverse=True)


def _folders(folder: Path) -> list[Path]:
    """Folders that may be checkpoints. One that a crash left beside its place counts only if that place is empty."""
    folders = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return [
        path
        for path in folders
        if not _UNFINISHED.fullmatch(path.name)
        and not (path.name.endswith(_REPLACED) and path.with_name(path.name.removesuffix(_REPLACED)) in folders)
    ]


def _named_by_latest(folder: str | Path) -> Path | None:
    """The DeepSpeed checkpoint that an earlier version wrote and named in ``latest``, or None."""
    try:
        path = Path(folder, Path(folder, LATEST).read_text(encoding="utf-8", errors="replace").strip())
    except OSError:
        return None
    return path if path in _folders(Path(folder)) and _is_unchecked(path) else None


def _is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def _is_unchecked(path: Path) -> bool:
    """True for DeepSpeed's files without a manifest: a checkpoint of an earlier version, perhaps incomplete."""
    return not _is_checkpoint(path) and any(path.glob("*_states.pt"))


def _check_sizes(path: Path) -> dict[str, Any]:
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        check_file(path, name, expected, checksum=False)
    return manifest


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _remove(path: Path) -> None:
    # If this process dies here, the next write removes folders of this name.
    unfinished = _unfinished(path)
    path.rename(unfinished)
    shutil.rmtree(unfinished)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
