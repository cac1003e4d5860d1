"""Files on this host: Hugging Face models and their downloads, output files, and free disk space."""

import errno
import json
import os
import shutil
import socket
import stat
from functools import cache
from pathlib import Path

from openrlhf_gtpo.errors import UsageError, one_line

INDEX = "model.safetensors.index.json"
WEIGHTS = "*.safetensors"
_SECOND_COPY = "consolidated*"  # all weights of a Mistral model again, under other names
SIDE_FILE_PATTERNS = (
    "config.json",
    "generation_config.json",
    "*processor_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*",
    "spiece.model",
    "tekken.json",
    "chat_template*",
    "prompts.json",  # written with each trained model (training/settings/prompts.py)
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)


def model_folder(source: str | Path, *, weights: bool = True, fetch: bool = True) -> Path:
    """Return the folder of the model ``source`` on this host; a name on the Hub is fetched into the cache first.

    If several processes call this at once, one fetches each file and the others wait for it (huggingface_hub 1.33.0,
    file_download.py, ``WeakFileLock``). With HF_HUB_OFFLINE, or without a network, only the cache is used. A process
    asks the Hub once.

    Args:
        weights: fetch safetensors too, not only configuration, tokenizer and templates.
        fetch: False uses only what is cached.

    Raises:
        UsageError: there is no such folder or name, or the Hub and the cache do not have all of it.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    import httpx
    from huggingface_hub import errors

    where = f"{source} is not a folder on {socket.gethostname()}"
    try:
        folder = _snapshot(str(source), weights, fetch)
    except (errors.HFValidationError, OSError, httpx.HTTPError) as error:
        reason = one_line(error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else error)
        raise UsageError(f"{where}, and cannot be read from the Hugging Face Hub or its cache: {reason}") from error
    # If only Transformers has cached the model, there is no list of all files, and a missing one goes unnoticed.
    shards = shards_of(folder / INDEX) if (folder / INDEX).exists() else [WEIGHTS]
    missing = sorted(shard for shard in shards if not any(folder.glob(shard))) if weights else []
    if missing:
        raise UsageError(
            f"{where}, and the weights in {folder} lack {missing[0]}; fetch them on a host with a network (hf "
            f"download {source}), or give a model with safetensors."
        )
    return folder


def shards_of(index: Path) -> list[str]:
    """List the files that the index of a checkpoint's weights names, each once.

    Raises:
        UsageError: the index cannot be read, for example because it is truncated. The message names the folder.
    """
    try:
        return sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{index.parent}: {index.name} cannot be read: {one_line(error)}") from error


def weight_files(folder: Path) -> list[Path]:
    """List the safetensors files of a model's weights: the ones that an index names, or all if it has no index.

    Raises:
        UsageError: as :func:`shards_of`.
    """
    if (folder / INDEX).exists():
        return [folder / name for name in shards_of(folder / INDEX)]
    return sorted(set(folder.glob(WEIGHTS)) - set(folder.glob(_SECOND_COPY)))


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of a model's weights, by name, from the headers of its safetensors; empty if it has none.

    Raises:
        UsageError: a file cannot be read, for example because it is truncated, or two files have the same weight
            (Transformers and vLLM would take different ones). The message names the folder.
    """
    from safetensors import SafetensorError, safe_open  # the doctor may run without it

    shapes: dict[str, tuple[int, ...]] = {}
    files: dict[str, str] = {}
    for file in sorted(set(folder.glob(WEIGHTS)) - set(folder.glob(_SECOND_COPY))):
        try:
            with safe_open(file, framework="pt") as tensors:
                names = tensors.keys()
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{folder}: {file.name} cannot be read: {one_line(error)}") from error
        for name in sorted(files.keys() & names):
            raise UsageError(f"{folder}: {files[name]} and {file.name} both have the weight {name}; keep one of them.")
        files |= dict.fromkeys(names, file.name)
    return shapes


def share_weights(folder: Path) -> None:
    """Give a model's safetensors the permissions of its config.json: safetensors 0.8 leaves them to their owner alone
    (https://github.com/safetensors/safetensors/issues/782)."""
    mode = (folder / "config.json").stat().st_mode
    for file in folder.rglob(WEIGHTS):  # adapters are in a subfolder
        file.chmod(stat.S_IMODE(mode))


@cache
def _snapshot(name: str, weights: bool, fetch: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*SIDE_FILE_PATTERNS, *((WEIGHTS, INDEX) if weights else ())]
    unread = ["*/*", _SECOND_COPY]  # subfolders hold other formats
    return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=unread, local_files_only=not fetch))


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: whenever this process dies, ``path`` has all of the text or is unchanged."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def check_output(flag: str, path: Path | None, *sources: Path) -> None:
    """Reject, before any work, an output file that cannot be written, or that is one of the inputs ``sources``.

    Raises:
        UsageError: what is wrong with ``path``.
    """
    if path is None:
        return
    existing = next(part for part in (path, *path.parents) if os.path.exists(part))
    if existing == path and any(os.path.exists(source) and path.samefile(source) for source in sources):
        raise UsageError(f"{flag} {path} is the input, which would be lost; name another file.")
    # Not a file: a folder, or a device such as /dev/null, which a command might replace.
    if not os.access(existing, os.W_OK) or not (existing.is_file() if existing == path else existing.is_dir()):
        raise UsageError(f"{flag} {path} cannot be written, because of {existing}; name another file.")


def free_bytes(path: str | Path) -> int | None:
    """Return the free bytes on the disk of ``path``, which need not exist; None if unknown."""
    try:
        return shutil.disk_usage(existing_parent(path)).free
    except OSError:
        return None


def existing_parent(path: str | Path) -> Path:
    """Return ``path``, or its nearest parent that exists."""
    folder = Path(path).absolute()
    while not os.path.exists(folder):  # not Path.exists, which raises for a folder without permission
        folder = folder.parent
    return folder


def is_full(error: BaseException | str) -> bool:
    """Tell from an error's text, perhaps from another process, whether a disk or a quota is full."""
    return any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))


def gigabytes(count: int) -> str:
    """Format ``count`` bytes in GB, or in MB below 0.1 GB."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"
