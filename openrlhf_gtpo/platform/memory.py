"""Peak memory: of the CUDA device, or resident in this process (Linux)."""

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Peak memory of what runs after construction.

    On the CPU it is exact to about a MiB, because resident memory counts pages, and the allocator keeps some. It
    cannot be measured without a CUDA device or a writable ``/proc/self/clear_refs`` (Linux).
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif (_PROCESS / "clear_refs").exists():
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = _peak() if _begin_anew() else None

    def beyond(self) -> int | None:
        """Peak since construction minus the memory in use then, in bytes; None if it cannot be measured."""
        return None if self._before is None else _peak() - self._before


class PeakByPhase:
    """Peak memory of this process in each of its phases, in bytes. Cheap enough to be always on.

    It counts the memory from PyTorch's allocator on a CUDA device, and resident memory elsewhere. Records nothing
    where neither can be measured.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._measurable = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count this context toward the phase ``name``, which may run in several pieces."""
        self._measurable = _begin_anew()
        yield
        self._record(name)

    def until_now(self, name: str) -> None:
        """Count the time since the last call, or since a phase began, toward the phase ``name``."""
        self._record(name)
        self._measurable = _begin_anew()

    def take(self) -> dict[str, int]:
        """Return the peaks by phase, in bytes, since the last call."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _record(self, name: str) -> None:
        if self._measurable:
            with contextlib.suppress(OSError):
                self._peaks[name] = max(self._peaks.get(name, 0), _peak())


class ReportsPeakMemory:
    """A mixin for actors and vLLM's workers, one object per process: a run's controller queries their peaks."""

    @cached_property
    def peaks(self) -> PeakByPhase:
        """This process's peaks."""
        return PeakByPhase()

    def take_peak_memory(self, until_now: str | None = None) -> dict[str, int]:
        """Return the peaks by phase, in bytes, since the last call.

        Args:
            until_now: the phase of this process since then, if it does not track phases itself.
        """
        if until_now is not None:
            self.peaks.until_now(until_now)
        return self.peaks.take()


def _begin_anew() -> bool:
    """Reset the peak to the current usage; False if it cannot be measured."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # not Linux, or a container with a read-only /proc
        return False
    return True


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with (_PROCESS / "status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
