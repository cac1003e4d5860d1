"""A run's metrics as JSON lines: the trainer's writer, and the reports' reader.

One object per line: `{"kind": "train"|"eval"|"run", "step": int, "time": unix seconds, <metric name>: number, ...}`.
Each start of the trainer writes a line of the kind "run" with the run's id, which a resumed run keeps. Once the
trained model is written, the trainer writes such a line with `"ended": true`.
"""

import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean, median
from typing import Any

from openrlhf_gtpo.report import names

Rows = Sequence[Mapping[str, Any]]

KINDS = (names.KIND_TRAIN, names.KIND_EVAL, names.KIND_RUN)
RESERVED = ("kind", "step", "time")

_ROOM = 2**20  # bytes of lines that may wait for a full disk


class MetricsWriter:
    """Appends a line per call and flushes it, so that a killed run loses at most one line. On a full disk, lines wait
    in memory until there is room.

    A resumed run appends to the same file; `read_runs` then keeps the later of two lines for one step.
    """

    def __init__(self, path: str | Path) -> None:
        """Open `path` for appending; its parents are created."""
        self._path = path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab+", buffering=_ROOM)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":  # the last run died while writing; end its partial line
                self._file.write(b"\n")

    def begin(self, step: int, settings: Mapping[str, Any]) -> Rows:
        """Append the first line of a start: the run's id and its settings.

        Args:
            step: the step after which a resumed run continues, with the id of the file's last run; 0 for a new one.
            settings: like the metrics of :meth:`write`.

        Returns:
            The earlier lines of the resumed run.
        """
        earlier: Rows = []
        if step > 0:
            with suppress(ValueError):  # another file, or the file was removed
                earlier = read_runs(self._path)[-1]
        run = next((row["run"] for row in earlier if "run" in row), uuid.uuid4().hex[:8])
        self._run = {"run": run, **settings}
        self.write(names.KIND_RUN, step, self._run)
        return earlier

    def end(self) -> None:
        """Append the last line of a completed run."""
        self.write(names.KIND_RUN, self._step, self._run | {"ended": True})
        phase_file(self._path).unlink(missing_ok=True)

    def phase(self, name: str) -> None:
        """Show what the run is doing now, as :func:`show_phase`."""
        show_phase(self._path, name)

    def write(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line.

        Args:
            kind: "train", "eval" or "run".
            step: the step these numbers belong to; eval at step 0 is before training.
            metrics: flat names to numbers. Anything with `item()` (numpy and torch scalars, one-element tensors)
                becomes a JSON number. NaN and infinities become null, because JSON lacks them, and a missing name
                would mean "was not computed". Strings, booleans and None stay as they are.

        Raises:
            ValueError: an unknown kind, a reserved name, or a value of another type or shape.
        """
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
        row: dict[str, Any] = {"kind": kind, "step": int(step), "time": time.time()}
        for name, value in metrics.items():
            if name in RESERVED:
                raise ValueError(f"metric {name!r} is reserved: every line has the fields {', '.join(RESERVED)}")
            row[name] = _json_value(name, value)
        self._file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        try:
            self._file.flush()
        except OSError as error:
            print(
                f"Warning: {self._path} could not be written ({error.strerror}); its lines wait in memory.",
                flush=True,
            )
        self._step = int(step)

    def flush(self) -> None:
        """Write the lines that wait for room; raises OSError if there is none yet."""
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def phase_file(path: Path) -> Path:
    """Return the file in which a run with the metrics file `path` shows what it is doing."""
    return path.with_name(f"{path.name}.phase")


def show_phase(path: str | Path | None, name: str) -> None:
    """Show what the run with the metrics file `path` is doing now: one of `names.STARTING` or `names.DOING`. This is
    not part of its record. If the file is missing, nobody watches the run."""
    if path is None:
        return
    with suppress(OSError):  # such as a full disk, on which a background save may be failing too
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        phase_file(Path(path)).write_text(name, encoding="utf-8")


def read_runs(path: str | Path) -> list[list[dict[str, Any]]]:
    """Read the runs of a metrics file, or of `metrics.jsonl` in a directory: the lines of each, in order of writing. A
    directory with OpenRLHF's TensorBoard files gives one run.

    A run begins with a line of the kind "run" at step 0. A file of version 0.1 has no such line; there a run begins
    where the first step repeats. An unreadable line is left out: a dying process truncates its last line, and after a
    resume that line is in the middle of the file. A resume discards earlier lines of later steps, because the weights
    have not seen those steps. Of a repeated step, the later line counts.

    Raises:
        ValueError: the file is absent or unreadable, or none of its lines is a metrics line.
    """
    path = Path(path)
    file = path / "metrics.jsonl" if path.is_dir() else path
    if path.is_dir() and not file.exists() and any(path.glob("events.out.tfevents.*")):
        return [_read_tensorboard(path)]
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read metrics from {file}: {error.strerror}") from None
    # Sort the lines into runs. A key of kind and step makes a later line replace an earlier one.
    runs: list[dict[tuple[str, int], dict[str, Any]]] = [{}]
    ends = [math.inf]  # of each run, the step that it was resumed from, until its next step
    broken = last = 0
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and row.get("kind") in KINDS:
            key = (row["kind"], row["step"])
            # Does this line begin another run?
            again = key in ((names.KIND_EVAL, 0), (names.KIND_TRAIN, 1)) and key in runs[-1]
            begins = key == (names.KIND_RUN, 0) and "ended" not in row
            if runs[-1] and (begins or again):
                runs.append({})
                ends.append(math.inf)
            # Does it resume one? Then lines of later steps count only once the run repeats them.
            if row["kind"] == names.KIND_RUN and "ended" not in row:
                ends[-1] = row["step"]
            elif row["step"] > ends[-1]:
                ends[-1] = math.inf
            if row["kind"] == names.KIND_TRAIN:
                if row["step"] <= last:  # repeated, from a checkpoint
                    runs[-1] = {old_key: old_row for old_key, old_row in runs[-1].items() if old_key[1] < row["step"]}
                last = row["step"]
            runs[-1].pop(key, None)
            runs[-1][key] = row
        elif line.strip():
            broken = broken or number
    if not runs[-1]:
        problem = f"line {broken} is not a metrics line" if broken else "it has no lines yet"
        raise ValueError(f"{file} has no metrics: {problem}")
    return [[row for row in rows.values() if row["step"] <= end] for rows, end in zip(runs, ends)]


def _read_tensorboard(folder: Path) -> list[dict[str, Any]]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise ValueError(f"{folder} has TensorBoard's files; install tensorboard to read them") from error
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()  # 0: all of them
    tags = events.Tags()["scalars"]
    points = []
    for tag in tags:
        kind, _, name = tag.partition("/")
        our_name = names.OPENRLHF.get(name, name)
        if kind in KINDS and (our_name == name or f"{kind}/{our_name}" not in tags):
            points += [(event.wall_time, event.step, kind, our_name, event.value) for event in events.Scalars(tag)]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    last = 0
    for when, step, kind, name, value in sorted(points):
        if kind == names.KIND_TRAIN:
            if step < last:  # repeated, from a checkpoint
                rows = {old_key: old_row for old_key, old_row in rows.items() if old_key[1] < step}
            last = step
        row = rows.setdefault((kind, step), {"kind": kind, "step": step, "time": when})
        row[name] = value if math.isfinite(value) else None  # as in MetricsWriter
    if not rows:
        raise ValueError(f"{folder} has no metrics: its TensorBoard files hold none of OpenRLHF's")
    return list(rows.values())


def series(rows: Rows, kind: str, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and values of one metric in order of step, without steps at which it is absent or null."""
    points = sorted((row["step"], row[name]) for row in rows if row["kind"] == kind and is_number(row.get(name)))
    return [step for step, _ in points], [float(value) for _, value in points]


def median_of_steps(rows: Rows, name: str) -> float | None:
    """Return the median of a metric over the steps, None if no step has it. The first step warms up caches and would
    distort a mean."""
    values = series(rows, names.KIND_TRAIN, name)[1]
    return median(values) if values else None


def held_out_names(rows: Rows) -> list[str]:
    """Return a run's names `eval_<datasource>_pass1`, sorted."""
    recorded = {name for row in rows if row["kind"] == names.KIND_EVAL for name in row}
    return sorted(n for n in recorded if n.startswith(names.EVAL_PREFIX) and n.endswith(names.EVAL_PASS1_SUFFIX))


def before_and_after(rows: Rows, held_out_name: str) -> tuple[float | None, float | None]:
    """Return held-out reward before training (the evaluation at step 0) and after it (the last one at a later step).

    Either is None if the run has no such evaluation.
    """
    points = dict(zip(*series(rows, names.KIND_EVAL, held_out_name)))
    after = [value for step, value in points.items() if step > 0]
    return points.get(0), (after[-1] if after else None)


def datasource_of(held_out_name: str) -> str:
    """Return the data source in a held-out name, such as "products" in `eval_products_pass1`."""
    return held_out_name.removeprefix(names.EVAL_PREFIX).removesuffix(names.EVAL_PASS1_SUFFIX)


def idle_steps(rows: Rows) -> list[int]:
    """Return the training steps in which nothing was learned, because no group had anything to compare."""
    return [row["step"] for row in rows if row["kind"] == names.KIND_TRAIN and names.NOTHING_LEARNED in row]


def idle_sentence(rows: Rows) -> str | None:
    """Count a run's idle steps in a clause; None if there are none."""
    idle, steps = len(idle_steps(rows)), sum(row["kind"] == names.KIND_TRAIN for row in rows)
    return f"nothing was learned in {idle} of {steps} steps" if idle else None


def late_training_reward(rows: Rows) -> float | None:
    """Return the mean training reward of the last tenth of a run's steps."""
    rewards = series(rows, names.KIND_TRAIN, names.REWARD_MEAN)[1]
    return fmean(rewards[-max(1, len(rewards) // 10) :]) if rewards else None


def decimals(value: float, sign: str = "") -> str:
    """Format a number with three decimals. Closer than 0.001 to 0 or 1, show two digits of the distance, unless it is
    rounding error. ``sign`` "+" shows the sign of positive numbers too."""
    apart = min(abs(value), abs(1 - abs(value)))
    places = 1 - math.floor(math.log10(apart)) if 1e-9 <= apart < 1e-3 else 3
    return f"{value:{sign}.{places}f}"


def is_number(value: Any) -> bool:
    """True if a value of a metrics line is a number, not null, text or a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json_value(name: str, value: Any) -> Any:
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"metric {name!r} must be one number, got {type(value).__name__}: {error}") from None
    if not isinstance(value, (int, float, str, type(None))):
        raise ValueError(f"metric {name!r} must be a number, got {type(value).__name__}")
    return None if isinstance(value, float) and not math.isfinite(value) else value
