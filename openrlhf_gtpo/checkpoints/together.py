"""Checkpoint operations that all ranks run together, on either backend: agree on one to load, publish a new one."""

import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import get_rank, get_world_size

from openrlhf_gtpo.checkpoints import folder as checkpoint_folder
from openrlhf_gtpo.checkpoints.files import CheckpointError, DamagedError, Entry, check_file
from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.platform.agreement import all_gather_objects, failure_of, from_first_rank, raise_together

_READERS = 4  # threads per rank


def choose(folders: Sequence[Path], tag: str | None = None) -> Path | None:
    """Choose the checkpoint to resume from, once all ranks have verified its files; None if there is none.

    A damaged one is renamed, and the one before it is tried.

    Args:
        folders: folders of checkpoints. The result is in the first, and each other one has a checkpoint of its tag.
        tag: accept only this one.

    Raises:
        CheckpointError: the requested one, or every existing one, cannot be loaded.
    """
    while True:
        path = from_first_rank(partial(checkpoint_folder.candidate, folders, tag), CheckpointError)
        if path is None:
            return None
        try:
            for folder in folders:
                verify(folder / path.name)
        except DamagedError as error:
            if tag is not None:
                raise
            aside = from_first_rank(partial(checkpoint_folder.set_aside, folder / path.name), CheckpointError)
            if get_rank() == 0:
                reason = str(error).removesuffix(".")
                print(f"Warning: {reason}; it was renamed to {aside}. Trying the one before it.", flush=True)
        else:
            if get_rank() == 0:
                print(checkpoint_folder.announcement(path), flush=True)
            return path


def verify(path: Path) -> None:
    """Verify the checksum of every file of a checkpoint, each on one rank.

    Raises:
        DamagedError: a file differs from what was written; on all ranks.
    """

    def read_share() -> None:
        if not (path / checkpoint_folder.MANIFEST).is_file():
            return  # DeepSpeed's, of an earlier version: nothing to compare with
        files = checkpoint_folder.read_manifest(path)["files"]
        largest_first = sorted(files.items(), key=lambda item: -item[1]["size"])
        with ThreadPoolExecutor(_READERS) as pool:
            check = partial(check_file, path, checksum=True)
            list(pool.map(lambda item: check(*item), largest_first[get_rank() :: get_world_size()]))

    raise_together(failure_of(read_share), DamagedError)


def agree(temporary: Path, target: Path, failure: str | None) -> None:
    """Check that all ranks have written their part of ``target`` into ``temporary``.

    Raises:
        CheckpointWriteError: a rank could not. The checkpoint's files are then removed.
    """
    sentence = f"The checkpoint {target} could not be written: {failure}; earlier ones are unchanged."
    try:
        raise_together(None if failure is None else sentence, CheckpointWriteError)
    except CheckpointWriteError:
        if get_rank() == 0:  # all ranks have finished writing by now
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def publish(temporary: Path, target: Path, contents: dict[str, Any], written: dict[str, Entry]) -> None:
    """Write the manifest and give the checkpoint its name.

    Args:
        contents: the manifest's fields besides the files; the first rank's are used.
        written: entries of files that this rank has written, by their paths in ``temporary``.

    Raises:
        CheckpointWriteError: the first rank could not. The checkpoint's files are then removed.
    """
    everyone = all_gather_objects(written)

    def write() -> None:
        entries = {name: entry for rank in everyone for name, entry in rank.items()}
        checkpoint_folder.write_manifest(temporary, contents, entries)
        checkpoint_folder.publish(temporary, target)

    agree(temporary, target, failure_of(write) if get_rank() == 0 else None)


def put_in_order(target: Path, others: Sequence[Path], *, max_num: int, max_mem_gb: float) -> None:
    """Remove excess checkpoints once ``target`` is published, and point ``latest`` at it. Arguments as for ``rotate``.

    Raises:
        CheckpointWriteError: the folder could not be written.
    """

    def write() -> None:
        checkpoint_folder.rotate(target.parent, target.name, others, max_num=max_num, max_mem_gb=max_mem_gb)
        checkpoint_folder.set_latest(target.parent, target.name)  # the removal has made room on the disk

    failure = failure_of(write) if get_rank() == 0 else None
    sentence = f"The checkpoint {target} is written, but its folder could not be tidied up: {failure}."
    raise_together(None if failure is None else sentence, CheckpointWriteError)
