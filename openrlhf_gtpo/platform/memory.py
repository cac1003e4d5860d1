"""How much memory something takes at its peak: of the CUDA device, or resident in this process (Linux)."""

import ctypes
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


class PeakMemory:
    """``beyond()`` is the peak since construction, less what was there then, in bytes.

    On the CPU it is exact to about a MiB: resident memory counts pages, and the allocator keeps some. None where the
    system has neither a CUDA device nor Linux's ``/proc/self/clear_refs``.
    """

    def __init__(self) -> None:
        self._cuda = torch.cuda.is_available()
        self.measurable = self._cuda or (_PROCESS / "clear_refs").exists()
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        elif self.measurable:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            (_PROCESS / "clear_refs").write_text("5")  # the peak begins anew
            self._before = _resident("VmRSS")

    def beyond(self) -> int | None:
        """Bytes above the beginning."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated()) - self._before
        return _resident("VmHWM") - self._before if self.measurable else None


def _resident(field: str) -> int:
    with (_PROCESS / "status").open() as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
