"""Directories that are built once: written beside their final place, then renamed.

A marker file records that a directory is complete, and its recipe.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from openrlhf_gtpo.errors import one_line

MARKER = "made_from.json"


def build_once(output_dir: str | Path, recipe: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Make `output_dir` with `build(empty_dir)`, unless it already has the result of the same `recipe`.

    An interrupted call leaves nothing under the final name, and a result with a missing or truncated file is rebuilt.

    Args:
        output_dir: the final directory; its parents are created.
        recipe: what the result depends on (versions, seeds, sizes), JSON-serializable.
        build: fills the directory that it gets. Its exceptions are passed on.

    Returns:
        The absolute path of `output_dir`.

    Raises:
        ValueError: `output_dir` has other files, or the result of another recipe. Nothing is deleted.
        OSError: the directory cannot be written.
    """
    target = Path(output_dir).expanduser().resolve()
    plain = json.loads(json.dumps(recipe))  # tuples become lists, as in the marker
    if _is_complete(target, plain):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        build(partial)
        written = sorted(path for path in partial.rglob("*") if path.is_file())
        files = {str(path.relative_to(partial)): path.stat().st_size for path in written}
        (partial / MARKER).write_text(json.dumps({"recipe": plain, "files": files}, indent=2) + "\n")
        # mkdtemp, safetensors and umask 077 make files unreadable to others, such as the account a job runs under.
        partial.chmod(0o755)
        for path in partial.rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        damaged = target.exists() and any(target.iterdir())
        if not (damaged and _is_complete(target, plain)):  # another process may have finished the same work first
            if damaged:  # renamed first: otherwise a kill during the deletion could leave it unmarked
                shutil.rmtree(target.rename(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent)))
            try:
                os.replace(partial, target)
            except OSError:  # another process may have finished meanwhile
                if not _is_complete(target, plain):
                    raise
    except SafetensorError as error:  # safetensors' error for a full disk
        raise OSError(f"{target} cannot be written: {one_line(error)}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _is_complete(target: Path, recipe: Mapping[str, Any]) -> bool:
    """True if `target` is the complete result of `recipe`; False if it is absent, empty or damaged."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise ValueError(f"{target} is a file; choose another --output")
    try:
        marker = json.loads((target / MARKER).read_text())
        earlier, files = marker["recipe"], marker["files"]
    except (OSError, ValueError, KeyError):
        if any(target.iterdir()):
            raise ValueError(
                f"{target} is not empty and was not made by this command (no {MARKER} in it): "
                "choose another --output or remove it"
            ) from None
        return False
    if earlier != recipe:
        differing = sorted(key for key in earlier.keys() | recipe.keys() if earlier.get(key) != recipe.get(key))
        details = ", ".join(f"{key} was {earlier.get(key)!r}, is now {recipe.get(key)!r}" for key in differing)
        details = " ".join(details.split())
        raise ValueError(f"{target} was made from other settings ({details}): choose another --output or remove it")
    return all((target / name).is_file() and (target / name).stat().st_size == size for name, size in files.items())
