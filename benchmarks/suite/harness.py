"""The harness of all benchmarks: times sides in turn, and prints tables.

A side is one of the things compared (a backend, a precision, a kernel): its phases by name, each a function. In each
repetition, every phase runs on all sides before the next phase, and a different side is first each time. A machine
that slows down thus slows all sides. Ratios are taken within a repetition.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_PRODUCTS = 10

Side = Mapping[str, Callable[[], Any]]


@dataclass
class Measured:
    """The measurements of one side.

    Fields:
        seconds: phase to the seconds of each counted repetition.
        about: other facts about the side, by name as in the JSON file.
    """

    seconds: dict[str, list[float]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, **self.about}

    def over(self, base: "Measured", phase: str) -> list[float]:
        """Ratios of its seconds to ``base``'s in ``phase``, by repetition; empty if either has none."""
        pairs = [side.seconds.get(phase, []) for side in (self, base)]
        return ratios(*pairs) if all(pairs) else []


def measure(
    sides: Mapping[str, Side],
    repeat: int,
    warm_up: int = 1,
    new_round: Callable[[int], Any] = lambda repetition: None,
    before_each: Callable[[], Any] = lambda: None,
) -> dict[str, Measured]:
    """Time ``repeat`` calls of every phase of every side, after ``warm_up`` uncounted ones.

    If there is a default process group, a phase begins at the same time on all ranks.

    Args:
        new_round: called with 0, 1, … at the beginning of each repetition, for example to make its batch; not timed.
        before_each: called before each call of a phase; not timed.
    """
    measured = {name: Measured({phase: [] for phase in side}) for name, side in sides.items()}
    phases = list(dict.fromkeys(phase for side in sides.values() for phase in side))
    for repetition in range(warm_up + repeat):
        new_round(repetition)
        for phase in phases:
            names = [name for name, side in sides.items() if phase in side]
            # Reverse every other cycle: otherwise a side always follows the same one, which may heat the GPU.
            way = -1 if repetition // len(names) % 2 else 1
            for name in (names[(repetition + way * i) % len(names)] for i in range(len(names))):
                before_each()
                if torch.distributed.is_initialized():
                    torch.distributed.barrier()
                seconds = seconds_of(sides[name][phase])
                if repetition >= warm_up:
                    measured[name].seconds[phase].append(seconds)
    return measured


def seconds_of(run: Callable[[], Any]) -> float:
    """Time ``run()`` in wall-clock seconds, including its own queued CUDA work but none queued before."""

    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    run()
    return now() - started


class SquareProduct:
    """A product of two random (n, n) matrices; MFU is relative to its rate. Runs once on creation, as a warm-up.

    Args:
        side: n.
        dtype: dtype of both matrices and of the result.
    """

    def __init__(self, side: int, dtype: torch.dtype = torch.bfloat16) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        self._left, self._right = (
            torch.randn(side, side, generator=generator, device=device, dtype=dtype) for _ in range(2)
        )
        self._out = torch.mm(self._left, self._right)
        self.flops = _PRODUCTS * 2 * side**3  # per call; a multiplication and an addition count as two

    def __call__(self) -> None:
        for _ in range(_PRODUCTS):
            torch.mm(self._left, self._right, out=self._out)

    def rate(self) -> float:
        """FLOP/s of one call."""
        return self.flops / seconds_of(self)


def ratios(values: Iterable[float], base: Iterable[float]) -> list[float]:
    """Ratios of ``values`` to ``base``, repetition by repetition."""
    return [a / b for a, b in zip(values, base, strict=True)]


def spread(values: Iterable[float]) -> tuple[float, float, float]:
    """The lowest, median and highest value."""
    values = sorted(values)
    return values[0], statistics.median(values), values[-1]


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> None:
    """Print a table with its title above and its notes below; all columns but the first are right-aligned."""
    lines = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"\n{title}")
    for first, *others in lines:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        print("  ".join([first.ljust(widths[0]), *cells]))
    for note in notes:
        print(note)


def median_and_range(values: Iterable[float], digits: int = 2) -> str:
    """Format the median and range of ``values``, as for ratios in tables."""
    low, median, high = spread(values)
    return f"{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
