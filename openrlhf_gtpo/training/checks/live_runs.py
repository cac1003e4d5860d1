"""Locks that keep two live runs from silently replacing each other's checkpoints, model and metrics."""

import fcntl
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments

_PATIENCE = 60.0  # seconds to wait for a run that is ending, such as a requeued job's previous one


@contextmanager
def alone(args: Arguments, patience: float = _PATIENCE) -> Iterator[Sequence[int]]:
    """Lock the run's ``--ckpt.path``, ``--ckpt.output_dir`` and ``--logger.metrics_path`` until the end of the block.

    The kernel releases a lock (flock(2)) when its last process ends, however it ends. Other hosts see it on NFS and
    Lustre, unless these are mounted with nolock, local_lock or localflock.

    Yields:
        the locks' file descriptors; a child that inherits them holds the locks too.

    Raises:
        UsageError: after ``patience`` seconds, another run still holds one of them.
        OSError: one of their folders cannot be made or written to.
    """
    paths = _lock_files(args)
    holder = f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
    if "SLURM_JOB_ID" in os.environ:
        holder += f", SLURM job {os.environ['SLURM_JOB_ID']}"
    files, deadline = list[TextIO](), 0.0
    try:
        for path, flag in paths.items():
            while isinstance(taken := _take(path), str):
                used = f"{flag} is in use by another run ({taken or 'just starting'})"
                if not deadline:
                    deadline = time.monotonic() + patience
                    print(f"{used}; waiting up to {patience:g} s for it to end.", file=sys.stderr, flush=True)
                if time.monotonic() > deadline:
                    raise UsageError(f"{used}. Each would replace what the other writes; give this run its own.")
                time.sleep(0.2)
            files.append(taken)
        for file in files:
            file.truncate(0)
            file.write(holder)
            file.flush()
        yield [file.fileno() for file in files]
    finally:
        for file in files:
            Path(file.name).unlink(missing_ok=True)
            file.close()


def _lock_files(args: Arguments) -> dict[Path, str]:
    """Map the lock file of each flag's folder or file, in a folder made for it, to the flag."""
    paths: dict[Path, str] = {}
    model = Path(args.ckpt.output_dir).absolute()
    Path(args.ckpt.path).mkdir(parents=True, exist_ok=True)
    model.parent.mkdir(parents=True, exist_ok=True)
    # Beside the model's folder, which appears as a whole; inside only if nothing can be written beside it.
    beside = os.access(model.parent, os.W_OK)
    paths[model.with_name(f"{model.name}.lock") if beside else model / "run.lock"] = f"--ckpt.output_dir {model}"
    paths[Path(args.ckpt.path, "run.lock")] = f"--ckpt.path {args.ckpt.path}"
    if metrics := args.logger.metrics_path:
        Path(metrics).parent.mkdir(parents=True, exist_ok=True)
        paths[Path(f"{metrics}.lock")] = f"--logger.metrics_path {metrics}"
    return {path.resolve(): flag for path, flag in paths.items()}


def _take(path: Path) -> TextIO | str:
    """Return the file, open and locked, or what its holder wrote into it."""
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        file.seek(0)
        holder = file.read()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return holder
        except OSError as error:
            print(
                f"Warning: {path} cannot be locked ({error.strerror}); a second run would not notice this one.",
                file=sys.stderr,
            )
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()  # its holder has just removed it
