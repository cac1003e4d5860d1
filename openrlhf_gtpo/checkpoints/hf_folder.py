"""The Hugging Face folder of a trained model: the trained weights, and all other files copied from the source model.

Files that training does not change are copied, because releases of Transformers misread each other's files: 5 writes
only ``rope_parameters``, for which 4 assumes a base of 10,000, and tokenizers that 4 rejects.
"""

import glob
import json
import os
import shutil
import uuid
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from openrlhf_gtpo.platform.files import INDEX, SIDE_FILE_PATTERNS, WEIGHTS, model_folder, share_weights

_CONFIG = "config.json"


def begin(directory: Path) -> Path:
    """Remove the leftovers of killed exports, and make a new folder to write the model ``directory`` into.

    Raises:
        OSError: the folder cannot be made.
    """
    if directory.exists() and not directory.is_dir():
        raise FileExistsError(f"{directory} is a file")
    # Inside a folder that exists, because its parent may be on another disk.
    parent = directory if directory.is_dir() else directory.parent
    parent.mkdir(parents=True, exist_ok=True)
    for place in {parent, directory.parent}:
        for left in place.glob(f"{glob.escape(directory.name)}.tmp-????????"):
            shutil.rmtree(left, ignore_errors=True)
    temporary = parent / f"{directory.name}.tmp-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    return temporary


def publish(temporary: Path, directory: Path, source: str | Path, **changed: Any) -> None:
    """Assemble the model ``directory`` from the weights and folders in ``temporary`` and the other files of
    ``source``. A new directory appears atomically where folders can be renamed. In an existing one, the model's files
    are replaced and other files stay.

    Args:
        source, changed: see :func:`copy_side_files`.

    Raises:
        OSError, ValueError: a file cannot be read or written.
    """
    for path in temporary.iterdir():
        if path.is_file() and not fnmatch(path.name, WEIGHTS) and path.name != INDEX:
            path.unlink()  # Transformers' save_pretrained writes more than weights
    copy_side_files(source, temporary, **changed)
    share_weights(temporary)
    if not directory.is_dir():
        try:
            temporary.rename(directory)
            return
        except OSError:  # an object store cannot rename folders: the code below copies the files
            directory.mkdir()
    new = {path.name for path in temporary.iterdir()}
    stale = [path for path in (directory / INDEX, *directory.glob("model*.safetensors")) if path.name not in new]
    for path in sorted(temporary.iterdir(), key=lambda path: path.name == _CONFIG):  # it marks a model, so it is last
        if path.is_dir():  # os.replace cannot replace a folder that has files
            shutil.rmtree(directory / path.name, ignore_errors=True)
        _move(path, directory / path.name)
    for path in stale:
        path.unlink(missing_ok=True)
    temporary.rmdir()


def copy_side_files(source: str | Path, directory: Path, *, dtype: str | None = None, **changed: Any) -> None:
    """Copy configuration, tokenizer, templates, code and license of the model ``source`` into the existing
    ``directory``, byte for byte except for changes in config.json.

    Args:
        source: the model's folder, or its name on the Hub; missing files are then fetched.
        dtype: the dtype of the weights, such as "bfloat16"; None keeps the configuration's.
        changed: other fields of the configuration to set.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the configuration is not JSON, or the model is missing and cannot be fetched.
    """
    patterns = (*SIDE_FILE_PATTERNS, "*.py")  # the model's own code, which runs only on request
    for path in sorted(model_folder(source, weights=False).iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in patterns):
            shutil.copyfile(path, directory / path.name)
    if dtype is None and not changed:
        return
    path = directory / _CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    if dtype is not None:
        # transformers 5 writes "dtype" and reads both; before https://github.com/huggingface/transformers/pull/39782
        # (4.56) it knows only the longer name.
        changed["dtype" if "dtype" in config else "torch_dtype"] = dtype
    if config | changed != config:
        path.write_text(json.dumps(config | changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _move(path: Path, target: Path) -> None:
    """Rename ``path``, or copy it where renaming fails."""
    try:
        os.replace(path, target)
    except OSError:
        if path.is_dir():
            target.mkdir()
            for part in path.iterdir():
                _move(part, target / part.name)
            path.rmdir()
        else:
            shutil.copyfile(path, target)
            path.unlink()
