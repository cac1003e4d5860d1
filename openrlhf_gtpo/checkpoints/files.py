"""The files of a checkpoint, each recorded with size and checksum, so that a read returns what was written."""

import os
from pathlib import Path
from typing import Any

import xxhash

Entry = dict[str, int | str]  # {"size": bytes, "xxh3": hexadecimal}

_BLOCK = 2**22  # bytes read at once
_PIECE = 2**18  # bytes written at once, and hashed while they are in the processor's cache


class CheckpointError(ValueError):
    """A checkpoint is missing, incomplete, or of another model. Raised before anything is changed."""


class DamagedError(CheckpointError):
    """A checkpoint differs from what was written."""


class HashedFile:
    """A new file for ``torch.save``, on disk when the ``with`` block ends; ``entry`` then describes it.

    The end of the block raises the first OSError of a write. If a write raised it at once, torch's archive writer
    would replace it with a RuntimeError about positions in the file (torch 2.13, caffe2/serialize/inline_container.cc,
    https://github.com/pytorch/pytorch/issues/76108).
    """

    def __init__(self, path: str | Path) -> None:
        self._file = open(path, "wb")
        self._hash = xxhash.xxh3_64()
        self._size = 0
        self._failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._size += len(view)
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            if self._failure is None:
                try:
                    self._file.write(piece)
                except OSError as error:
                    self._failure = error
            self._hash.update(piece)
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Do nothing when torch calls this at the end of an archive; the block's end flushes."""

    @property
    def entry(self) -> Entry:
        return {"size": self._size, "xxh3": self._hash.hexdigest()}

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(self, kind: Any, *unused: Any) -> None:
        with self._file:
            if self._failure is not None:
                raise self._failure
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())


def describe(path: Path) -> Entry:
    """Sync a small file, written by something else, to disk, and return its entry."""
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return {"size": path.stat().st_size, "xxh3": _xxh3(path)}


def check_file(folder: Path, name: str, expected: Entry, *, checksum: bool) -> None:
    """Check that a file matches ``expected``: its size and, with ``checksum``, all of its contents.

    Raises:
        DamagedError: it does not match.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            raise DamagedError(f"{folder} is incomplete: its file {name} has {size} bytes of {expected['size']}")
        if checksum and _xxh3(path) != expected.get("xxh3"):
            raise DamagedError(f"{folder} is damaged: its file {name} has changed")
    except FileNotFoundError:
        raise DamagedError(f"{folder} is incomplete: its file {name} is missing") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None


def write_text(path: Path, text: str) -> None:
    """Write a small file and sync it to disk."""
    with HashedFile(path) as stream:
        stream.write(text.encode())


def sync(folder: Path) -> None:
    """Flush the names in ``folder`` to disk; without this, a rename may not survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _xxh3(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
