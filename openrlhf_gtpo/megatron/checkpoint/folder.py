"""A folder of checkpoints, and what is in each: written whole or not at all, checked before it is loaded, rotated.

A checkpoint is written under a temporary name, its manifest last, and then renamed: what a crash leaves is never taken
for one. ``latest`` names the last. The driver asks here before any engine starts, so this module knows neither torch
nor megatron; functions that write are for one process at a time, the first rank's.
"""

import json
import math
import os
import re
import shutil
import uuid
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"  # written last: a folder without it is no checkpoint
TRAINING_STATE = "training_state.pt"
SIDE_FILES = "hf"  # the tokenizer, configuration and templates of the model, as Hugging Face stores them
LATEST = "latest"

FORMAT = 1
_CHECKSUM_UP_TO = 16 * 2**20  # bytes; larger files are known by their size alone, as reading them takes minutes
_DISTRIBUTIONS = ("openrlhf_gtpo", "openrlhf", "megatron-core", "mbridge", "torch", "transformers")
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
_BEST = "best"  # what OpenRLHF's tags of best checkpoints begin with
_UNFINISHED = re.compile(r"(?P<tag>.+)\.tmp-[0-9a-f]{8}")
_REPLACED = ".replaced"


class CheckpointError(ValueError):
    """A checkpoint that is missing, incomplete, or of another model. Raised before anything is changed."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; what was there before it is as it was."""


def latest(folder: str | Path) -> Path | None:
    """The last checkpoint that was written whole; None where there is none.

    Raises:
        CheckpointError: the folder's ``latest`` names a checkpoint that is not there.
    """
    folder = Path(folder)
    try:
        path = folder / (folder / LATEST).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    # One that was being replaced in a crash is beside its place.
    for candidate in (path, path.with_name(path.name + _REPLACED)):
        if _is_checkpoint(candidate):
            return candidate
    there = ", ".join(path.name for path in _checkpoints(folder))
    hint = f"write the name of one that is ({there}) into {folder / LATEST}" if there else "there is none at all"
    raise CheckpointError(f"{folder / LATEST} names {path.name!r}, which is not a checkpoint there; {hint}.")


def check_latest(folder: str | Path, hf_config: Any, *, dtype: str) -> None:
    """Check that training of the model can resume from the latest checkpoint, if there is one; for the driver.

    Raises:
        CheckpointError: as :func:`check_checkpoint`.
    """
    path = latest(folder)
    if path is not None:
        check_checkpoint(path, hf_config, dtype=dtype, for_training=True)


def resolve(path: str | Path) -> Path:
    """The checkpoint that ``path`` is, or the latest one of the folder of checkpoints that it is.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if path.is_dir() and not _is_checkpoint(path):
        path = latest(path) or path
    read_manifest(path)
    return path


def read_manifest(folder: Path) -> dict[str, Any]:
    """What the checkpoint says about itself.

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
        manifest |= {"files": files, "model": dict(manifest["model"])}
        [manifest[name] for name in ("dtype", "optimizer")], [entry["size"] for entry in files.values()]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); use another checkpoint.") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {version}, and this version of openrlhf_gtpo reads format {FORMAT}; go "
            "on with the version that wrote it, or from another checkpoint."
        )
    return manifest


def check_checkpoint(
    folder: str | Path, hf_config: Any = None, *, dtype: str | None = None, for_training: bool = False
) -> dict[str, Any]:
    """Check that a checkpoint can be loaded, from its files' names, sizes and (of small ones) checksums.

    Args:
        folder: of one checkpoint.
        hf_config: of the model that it is for; None takes any.
        dtype: of the parameters it is for, such as "bfloat16"; None takes any.
        for_training: the optimizer's state is wanted too.

    Returns:
        its manifest.

    Raises:
        CheckpointError: the first thing that is wrong, in one sentence.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if hf_config is not None:
        stored, wanted = manifest["model"], describe_model(hf_config)
        differences = [
            f"{name} {stored.get(name)!r} and not {wanted.get(name)!r}"
            for name in _SHAPE_FIELDS
            if stored.get(name) != wanted.get(name)
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
    for name, expected in manifest["files"].items():
        _check_file(folder, name, expected)
    return manifest


def describe_model(hf_config: Any) -> dict[str, Any]:
    """What two models must share for the weights of one to fit the other, from the Hugging Face configuration."""
    described = {name: getattr(hf_config, name, None) for name in _SHAPE_FIELDS}
    heads = hf_config.num_attention_heads
    described["num_key_value_heads"] = described["num_key_value_heads"] or heads
    described["head_dim"] = described["head_dim"] or hf_config.hidden_size // heads
    return {name: value for name, value in described.items() if value is not None}


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
            # A crash left an earlier checkpoint beside its place: back it goes, unless its successor has come.
            place = path.with_name(path.name.removesuffix(_REPLACED))
            if place.exists():
                shutil.rmtree(path)
            else:
                path.rename(place)
    temporary = _unfinished(target)
    temporary.mkdir()
    return temporary


def write_manifest(folder: Path, contents: dict[str, Any]) -> None:
    """Describe every file of ``folder`` beside ``contents``; the folder is complete afterwards, and on disk."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    files = {path.relative_to(folder).as_posix(): _describe_file(path) for path in paths}
    described = {"format": FORMAT, **contents, "versions": _versions(), "files": files}
    _write_through(folder / MANIFEST, json.dumps(described, indent=1))
    _sync(folder)


def publish(temporary: Path, target: Path) -> None:
    """Give what is complete in ``temporary`` its name; a checkpoint of that name is replaced."""
    replaced = target.with_name(target.name + _REPLACED)
    if target.exists():
        if _is_checkpoint(target):
            target.rename(replaced)
        else:
            target.rmdir()  # an empty folder; anything else is not ours to remove
    temporary.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def set_latest(folder: Path, tag: str) -> None:
    """Let ``latest`` name ``tag``, at once or not at all."""
    temporary = folder / f".{LATEST}.tmp"
    _write_through(temporary, tag + "\n")
    temporary.replace(folder / LATEST)
    _sync(folder)


def rotate(folder: Path, kept: str, *, max_num: int, max_mem_gb: float) -> list[str]:
    """Remove excess checkpoints, as OpenRLHF does: those without a metric first, then the worst, then the oldest.

    At most ``max_num`` checkpoints and ``max_mem_gb`` (2^30 bytes) stay. Tags that begin with "best" do not count as
    checkpoints and are not removed, except earlier ones where ``kept`` is a new best. ``kept`` always stays.

    Returns:
        the removed tags.
    """
    best = [path for path in _checkpoints(folder) if path.name.startswith(_BEST)]
    regular = [path for path in _checkpoints(folder) if not path.name.startswith(_BEST)]
    removed = [path for path in best if path.name != kept] if kept.startswith(_BEST) else []
    for path in removed:
        _remove(path)
    for path in sorted((path for path in regular if path.name != kept), key=_worth):
        if len(regular) <= max_num and _bytes(folder) <= max_mem_gb * 2**30:
            break
        _remove(path)
        removed.append(path)
        regular.remove(path)
    return [path.name for path in removed]


def _worth(path: Path) -> tuple[bool, float, float]:
    try:
        metric = float(read_manifest(path)["metric"]["value"])
    except (CheckpointError, KeyError, TypeError, ValueError, OverflowError):
        metric = math.nan
    known = not math.isnan(metric)
    return known, metric if known else 0.0, path.stat().st_mtime


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
    files = (file for path in _checkpoints(folder) for file in path.rglob("*"))
    return sum(file.stat().st_size for file in files if file.is_file())


def _remove(path: Path) -> None:
    # Under this name the next write clears it away, should this end in the middle.
    unfinished = _unfinished(path)
    path.rename(unfinished)
    shutil.rmtree(unfinished)


def _unfinished(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def _check_file(folder: Path, name: str, expected: dict[str, int]) -> None:
    path = folder / name
    try:
        found = _describe_file(path) if "crc32" in expected else {"size": path.stat().st_size}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not whole: its file {name} is missing; use another checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); use another checkpoint.") from None
    if found["size"] != expected["size"]:
        raise CheckpointError(
            f"{folder} is not whole: its file {name} has {found['size']} bytes of {expected['size']}; use another "
            "checkpoint."
        )
    if found != expected:
        raise CheckpointError(f"{folder} is damaged: its file {name} has changed; use another checkpoint.")


def _describe_file(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    if size > _CHECKSUM_UP_TO:
        return {"size": size}
    return {"size": size, "crc32": zlib.crc32(path.read_bytes())}


def _versions() -> dict[str, str]:
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _write_through(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Bring the names in ``folder`` to disk: without it a rename may not survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
