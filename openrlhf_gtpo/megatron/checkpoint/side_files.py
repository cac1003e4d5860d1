"""The small files beside a Hugging Face model's weights: configuration, tokenizer, templates. Knows no megatron."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

PATTERNS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "sentencepiece*",
    "spiece.model",
    "chat_template*",
    "LICENSE*",
)


def local_folder(source: str | Path) -> Path:
    """``source``, or where the files of a model of that name on the Hub are, fetched if need be."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(str(source), allow_patterns=list(PATTERNS)))


def copy_side_files(source: str | Path, directory: Path, *, dtype: str | None = None) -> None:
    """Copy them from the model ``source`` into ``directory``, which exists.

    Args:
        dtype: the weights' own from now on, such as "bfloat16", written into the configuration; None leaves it.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: the configuration is not JSON.
    """
    for path in sorted(local_folder(source).iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in PATTERNS):
            shutil.copyfile(path, directory / path.name)
    if dtype is not None:
        _set_dtype(directory / "config.json", dtype)


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    # transformers 5 writes "dtype" and reads both; 4 knows the longer name alone.
    config["dtype" if "dtype" in config else "torch_dtype"] = dtype
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
