"""Reads an experiment's file (docs/experiments.md): its runs, each with all flags of its command line. Does not import
torch.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, ValidationError

from openrlhf_gtpo.errors import UsageError, one_line

OURS = ("train.seed", "logger.metrics_path", "ckpt.output_dir", "ckpt.path", "ckpt.load_enable")
_OURS_OF_EVALUATE = ("model", "output")

_Scalar = str | bool | int | float
Flags = dict[str, _Scalar | list[_Scalar]]
# Names of folders. A leading dot would hide one, and matplotlib leaves labels with a leading _ out of legends.
_ByName = Annotated[
    dict[Annotated[str, Field(pattern=r"^[^._\W][\w.+-]*$|^[+-][\w.+-]*$")], Flags | None], Field(min_length=1)
]


class _Entries(BaseModel, extra="forbid", strict=True):
    """The file's schema."""

    output: str
    flags: Annotated[Flags, Field(min_length=1)]
    methods: _ByName
    seeds: Annotated[list[NonNegativeInt], Field(min_length=1)]
    settings: dict[str, _ByName] = {}
    baseline: str | None = None
    evaluate: Flags | None = None


@dataclass(frozen=True)
class Run:
    """One training of a grid.

    Fields:
        label: its method and settings, common to its seeds: "gtpo" or "gtpo/low".
        seed: training seed.
        folder: the folder of all its files.
        flags: flags of the command line, without dashes.
    """

    label: str
    seed: int
    folder: Path
    flags: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.label}, seed {self.seed}"


@dataclass(frozen=True)
class Grid:
    """An experiment.

    Fields:
        output: its output folder.
        runs: all runs, with seeds innermost.
        baseline: the method to compare others with, if any; it is first in the table.
        evaluate: flags of cli.evaluate, or None for no evaluation.
    """

    output: Path
    runs: list[Run]
    baseline: str | None
    evaluate: dict[str, Any] | None


def read_grid(path: Path) -> Grid:
    """Read the grid of a YAML file.

    Raises:
        UsageError: the file cannot be read, or an entry is wrong. The message names the first.
    """
    import yaml

    class KeysOnce(yaml.SafeLoader):
        """Rejects a key that occurs twice, where SafeLoader takes the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(str(key.value) for key, _ in node.value)
            twice = next((key for key, times in keys.items() if times > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"from line {node.start_mark.line + 1} on {twice} is given twice; leave one out.")
            return super().construct_mapping(node, deep)

    # Parse the file, and check its entries against the schema.
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), KeysOnce)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {one_line(error)}") from error
    try:
        file = _Entries.model_validate(entries)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UsageError(f"{path}: {place}: {first['msg']}, got {first['input']!r:.100}.") from error
    # Check flags wherever they may stand, then seeds and baseline.
    groups: dict[str, Flags | None] = {"flags": file.flags, "evaluate": file.evaluate}
    groups |= {f"methods.{name}": given for name, given in file.methods.items()}
    for axis, values in file.settings.items():
        groups |= {f"settings.{axis}.{name}": given for name, given in values.items()}
    for place, given in groups.items():
        _check_flags(path, place, given or {})
    if len({*file.seeds}) < len(file.seeds):
        raise UsageError(f"{path}: seeds must be given once each, got {file.seeds}.")
    if file.baseline is not None and file.baseline not in file.methods:
        raise UsageError(f"{path}: the baseline must be one of {', '.join(file.methods)}, got {file.baseline!r}.")
    # Build methods × settings × seeds. A setting must not override a method or another setting.
    output = Path(file.output).expanduser()
    runs = []
    for method, *chosen in itertools.product(file.methods, *file.settings.values()):
        flags: dict[str, Any] = file.flags | (file.methods[method] or {})
        set_by = dict.fromkeys(file.methods[method] or {}, f"methods.{method}")
        for (axis, values), name in zip(file.settings.items(), chosen, strict=True):
            for flag, value in (values[name] or {}).items():
                if flag in set_by:
                    raise UsageError(f"{path}: settings.{axis}.{name} and {set_by[flag]} both set {flag}; keep one.")
                set_by[flag] = f"settings.{axis}.{name}"
                flags[flag] = value
        label = "/".join([method, *chosen])
        for seed in file.seeds:
            folder = output / label / f"seed-{seed}"
            runs.append(Run(label, seed, folder, flags | {"train.seed": seed} | places(folder)))
    return Grid(output, runs, file.baseline, file.evaluate)


def words(flags: Mapping[str, Any]) -> list[str]:
    """Convert ``flags`` to a command line."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            argv += [f"--{name}", *map(str, values)]
    return argv


def places(folder: Path) -> dict[str, Any]:
    """Return the flags that put a run's files into ``folder``."""
    return {
        "logger.metrics_path": str(folder / "metrics.jsonl"),
        "ckpt.output_dir": str(folder / "model"),
        "ckpt.path": str(folder / "checkpoints"),
    }


def _check_flags(path: Path, place: str, flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        if name in (_OURS_OF_EVALUATE if place == "evaluate" else OURS):
            raise UsageError(f"{path}: {place} sets {name}, which the experiment sets itself; leave it out.")
        if name.startswith("logger.wandb.k") and value != "WANDB_API_KEY":
            raise UsageError(
                f"{path}: {place}.{name} must be the word WANDB_API_KEY, with W&B's key in that environment "
                "variable, because a run's folder and its page show its flags."
            )
