"""What is in one checkpoint's folder: what it says about itself, and whether all of it is there and whole.

The driver asks here before any engine starts, so this module knows neither torch nor megatron.
"""

import json
import os
import zlib
from importlib import metadata
from pathlib import Path
from typing import Any

MANIFEST = "checkpoint.json"  # written last: a folder without it is no checkpoint
TRAINING_STATE = "training_state.pt"
SIDE_FILES = "hf"  # the tokenizer, configuration and templates of the model, as Hugging Face stores them

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


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or of another model. Raised before anything is changed."""


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; what was there before it is as it was."""


def describe_model(hf_config: Any) -> dict[str, Any]:
    """What two models must share for the weights of one to fit the other, from the Hugging Face configuration."""
    described = {name: getattr(hf_config, name, None) for name in _SHAPE_FIELDS}
    heads = hf_config.num_attention_heads
    described["num_key_value_heads"] = described["num_key_value_heads"] or heads
    described["head_dim"] = described["head_dim"] or hf_config.hidden_size // heads
    return {name: value for name, value in described.items() if value is not None}


def write_manifest(folder: Path, contents: dict[str, Any]) -> None:
    """Describe every file of ``folder`` beside ``contents``; the folder is complete afterwards, and on disk.

    Raises:
        OSError: a file cannot be read or written.
    """
    files = {path.relative_to(folder).as_posix(): _describe_file(path) for path in _files(folder)}
    described = {"format": FORMAT, **contents, "versions": _versions(), "files": files}
    with open(folder / MANIFEST, "w", encoding="utf-8") as stream:
        json.dump(described, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


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
        version, _, _ = manifest["format"], manifest["model"], manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({type(error).__name__}); take another checkpoint.") from None
    if version != FORMAT:
        raise CheckpointError(f"{folder} has checkpoint format {version}, and this version reads format {FORMAT}.")
    return manifest


def check_checkpoint(
    folder: str | Path, hf_config: Any = None, *, dtype: str | None = None, for_training: bool = False
) -> dict[str, Any]:
    """Refuse a checkpoint that could not be loaded, from its files' names, sizes and (of small ones) checksums.

    Args:
        folder: of one checkpoint.
        hf_config: of the model that it is for; None takes any.
        dtype: of the parameters it is for, such as "bfloat16"; None takes any.
        for_training: the optimizer's state is wanted too.

    Returns:
        what the checkpoint says about itself.

    Raises:
        CheckpointError: the first thing that is wrong, in one sentence.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if hf_config is not None:
        _check_model(folder, manifest["model"], describe_model(hf_config))
    if dtype is not None and manifest["dtype"] != dtype:
        raise CheckpointError(
            f"{folder} was written in {manifest['dtype']} and this run is in {dtype}; run it in {manifest['dtype']}."
        )
    if for_training and not manifest["optimizer"]:
        raise CheckpointError(
            f"{folder} has weights and no optimizer state, so training cannot go on from it; start from its weights "
            "as a Hugging Face model (python3 -m openrlhf_gtpo.cli.convert megatron-to-hf)."
        )
    for name, expected in manifest["files"].items():
        _check_file(folder, name, expected)
    return manifest


def sync_folder(folder: Path) -> None:
    """Bring the names in ``folder`` to disk: a rename is not there after a power cut before that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_model(folder: Path, stored: dict[str, Any], wanted: dict[str, Any]) -> None:
    names = [name for name in _SHAPE_FIELDS if stored.get(name) != wanted.get(name)]
    if names:
        differences = ", ".join(f"{name} {stored.get(name)} and not {wanted.get(name)}" for name in names)
        raise CheckpointError(f"{folder} is a checkpoint of another model: it has {differences}.")


def _check_file(folder: Path, name: str, expected: dict[str, int]) -> None:
    path = folder / name
    try:
        found = _describe_file(path) if "crc32" in expected else {"size": path.stat().st_size}
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not whole: its file {name} is missing; take another checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); take another checkpoint.") from None
    if found["size"] != expected["size"]:
        raise CheckpointError(
            f"{folder} is not whole: its file {name} has {found['size']} bytes of {expected['size']}; take another "
            "checkpoint."
        )
    if found != expected:
        raise CheckpointError(f"{folder} is damaged: its file {name} has changed; take another checkpoint.")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


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
