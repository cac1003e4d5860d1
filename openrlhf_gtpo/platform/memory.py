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

    On the CPU it is exact to about a MiB: resident memory counts pages, and the allocator keeps some. Not measurable
    where the system has neither a CUDA device nor a ``/proc/self/clear_refs`` (Linux) that can be written.
    """

    def __init__(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elif (_PROCESS / "clear_refs").exists():
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self._before = _peak() if _begin_anew() else None

    def beyond(self) -> int | None:
        """The peak since construction beyond what was in use then, in bytes; None if it cannot be measured."""
        return None if self._before is None else _peak() - self._before


class PeakByPhase:
    """The most memory that this process held in each of its phases, in bytes: cheap enough to be always on.

    On a CUDA device it is what PyTorch's allocator has handed out, elsewhere the resident memory. Nothing is recorded
    where neither can be measured.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, int] = {}
        self._measurable = True

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what runs in this context toward the phase ``name``, which may come in several pieces."""
        self._measurable = _begin_anew()
        yield
        self._record(name)

    def until_now(self, name: str) -> None:
        """Count toward the phase ``name`` what has run since this was last called, or since a phase began."""
        self._record(name)
        self._measurable = _begin_anew()

    def take(self) -> dict[str, int]:
        """The peaks by phase, in bytes, since this was last called."""
        peaks, self._peaks = self._peaks, {}
        return peaks

    def _record(self, name: str) -> None:
        if self._measurable:
            with contextlib.suppress(OSError):
                self._peaks[name] = max(self._peaks.get(name, 0), _peak())


class ReportsPeakMemory:
    """Mixed into actors and vLLM's workers, one object per process, which a run's controller asks for their peaks."""

    @cached_property
    def peaks(self) -> PeakByPhase:
        """The peaks of this process."""
        return PeakByPhase()

    def take_peak_memory(self, until_now: str | None = None) -> dict[str, int]:
        """The peaks by phase, in bytes, since this was last called.

        Args:
            until_now: the phase that this process has been in since then, if it cannot know that itself.
        """
        if until_now is not None:
            self.peaks.until_now(until_now)
        return self.peaks.take()


def _begin_anew() -> bool:
    """Reset the peak to what is in use now; False if it cannot be measured."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:  # no Linux, or a container that keeps /proc to itself
        return False
    return True


def _peak() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.max_memory_allocated())
    with (_PROCESS / "status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
