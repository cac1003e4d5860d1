"""A lock for compilations that is released when its owner dies."""

import os
import time
from contextlib import suppress

from torch.utils.file_baton import FileBaton

_QUIET = 600.0  # seconds without a change in its folder, after which its compiler counts as dead


class CompileLock(FileBaton):
    """torch's lock, a file in ``~/.cache/torch_extensions``, with a takeover. A killed compiler leaves torch's lock
    behind, and every later run of every checkout would wait for it silently (torch 2.13, utils/file_baton.py)."""

    def try_acquire(self) -> bool:
        """Wait for the lock and return True. A process that had to wait finds everything compiled."""
        folder = os.path.dirname(self.lock_file_path)
        if os.path.exists(self.lock_file_path):
            print(f"Waiting for the compilation in {folder}, or for {_QUIET:.0f} s without a new file", flush=True)
        while not super().try_acquire():
            with suppress(FileNotFoundError):  # released meanwhile
                if time.time() - max(entry.stat().st_mtime for entry in os.scandir(folder)) > _QUIET:
                    os.remove(self.lock_file_path)
            time.sleep(self.wait_seconds)
        return True
