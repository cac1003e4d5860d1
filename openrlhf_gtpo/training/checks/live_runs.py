"""Keeps two live runs out of each other's checkpoints, model and metrics, which they would replace without a word."""

import fcntl
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments

_PATIENCE = 60.0  # seconds for a run that is ending, such as that of a job before it was requeued
_TOUCH = 5.0  # seconds between two touches of a lock by its holder
_SILENCE = 20.0  # seconds without one, after which a holder on another host counts as dead


@contextmanager
def alone(args: Arguments, patience: float = _PATIENCE, silence: float = _SILENCE) -> Iterator[Sequence[int]]:
    """Lock the run's ``--ckpt.path``, ``--ckpt.output_dir`` and ``--logger.metrics_path`` until the end of the block.

    The kernel releases a lock (flock(2)) when the last process that has it ends, however it ends. NFS has other hosts
    see it, unless mounted with nolock or local_lock, as Lustre with localflock does not. Therefore the file says whose
    it is, the holder touches it, and one that another host's process has left is only taken after ``silence`` seconds
    without a touch.

    Yields:
        the locks' file descriptors; a child that inherits them has the locks too.

    Raises:
        UsageError: another run has one of them, still after ``patience`` seconds.
        OSError: one of their folders cannot be made or written to.
    """
    paths = _lock_files(args)
    holder = f"process {os.getpid()} on {socket.gethostname()}, started {time.strftime('%Y-%m-%d %H:%M:%S')}"
    if "SLURM_JOB_ID" in os.environ:
        holder += f", SLURM job {os.environ['SLURM_JOB_ID']}"
    over, files, silent, deadline = threading.Event(), list[TextIO](), dict[str, tuple[int, float]](), 0.0
    try:
        for path, flag in paths.items():
            while isinstance(taken := _take(path, silent, silence), str):
                used = f"{flag} is in use by another run ({taken or 'which is starting'})"
                if not deadline:
                    deadline = time.monotonic() + patience
                    print(f"{used}; waiting for its end, {patience:g} s at most.", file=sys.stderr, flush=True)
                if time.monotonic() > deadline:
                    raise UsageError(f"{used}, and each would replace what the other writes; give this one its own.")
                time.sleep(0.2)
            files.append(taken)
        for file in files:
            file.truncate(0)
            file.write(f"{_kernel()}\n{holder}")
            file.flush()

        def touch() -> None:
            while not over.wait(_TOUCH):
                for file in files:
                    with suppress(OSError):
                        os.utime(file.fileno())

        toucher = threading.Thread(target=touch, daemon=True)
        toucher.start()
        try:
            yield [file.fileno() for file in files]
        finally:
            over.set()
            toucher.join()
    finally:
        for file in files:
            Path(file.name).unlink(missing_ok=True)
            file.close()


def _lock_files(args: Arguments) -> dict[Path, str]:
    """The file that is locked for each flag's folder or file, in a folder that exists now, to the flag."""
    paths: dict[Path, str] = {}
    model = Path(args.ckpt.output_dir).absolute()
    Path(args.ckpt.path).mkdir(parents=True, exist_ok=True)
    model.parent.mkdir(parents=True, exist_ok=True)
    # Beside a folder that the trained model is given at once; in it only if it must be there already.
    beside = os.access(model.parent, os.W_OK)
    paths[model.with_name(f"{model.name}.lock") if beside else model / "run.lock"] = f"--ckpt.output_dir {model}"
    paths[Path(args.ckpt.path, "run.lock")] = f"--ckpt.path {args.ckpt.path}"
    if metrics := args.logger.metrics_path:
        Path(metrics).parent.mkdir(parents=True, exist_ok=True)
        paths[Path(f"{metrics}.lock")] = f"--logger.metrics_path {metrics}"
    return {path.resolve(): flag for path, flag in paths.items()}


def _take(path: Path, silent: dict[str, tuple[int, float]], silence: float) -> TextIO | str:
    """The open and locked file, or the words of its holder.

    Args:
        silent: of holders on other hosts: the last touch, in ns, and since when nothing has followed it.
    """
    while True:
        file = path.open("a+", encoding="utf-8", errors="replace")
        file.seek(0)
        record = file.read()
        kernel, _, holder = record.partition("\n")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError:
            file.close()
            return holder
        except OSError:  # a file system without locks
            is_locked = False
        here, now = os.fstat(file.fileno()), time.monotonic()
        if not (path.exists() and os.path.samestat(here, path.stat())):  # its holder has just removed it
            file.close()
            continue
        before, since = silent.get(record, (0, now))
        if not record or (is_locked and kernel == _kernel()) or now - since >= silence:
            return file
        if here.st_mtime_ns != before:
            silent[record] = here.st_mtime_ns, now
        file.close()
        return holder


def _kernel() -> str:
    """What tells this host's running kernel, which decides on its locks, from any other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
