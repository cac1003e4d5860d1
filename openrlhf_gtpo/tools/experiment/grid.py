"""An experiment's file, as in docs/experiments.md: which runs it asks for, each with all flags of its command line.
Does not import torch.
"""

import difflib
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf_gtpo.errors import UsageError, one_line

_REQUIRED = {"output": str, "flags": dict, "methods": dict, "seeds": list}
_OPTIONAL = {"settings": dict, "baseline": str, "evaluate": dict}
OURS = ("train.seed", "logger.metrics_path", "ckpt.output_dir", "ckpt.path", "ckpt.load_enable")
_OURS_OF_EVALUATE = ("model", "output")
_NAME = re.compile(r"(?![._])[\w.+-]+")  # a leading dot hides a folder, and matplotlib leaves _ out of legends


@dataclass(frozen=True)
class Run:
    """One training of a grid.

    Fields:
        label: its method and settings, which its seeds share: "gtpo" or "gtpo/low".
        seed: training seed.
        folder: where all its files go.
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
        output: its folder.
        runs: all runs, with seeds innermost.
        baseline: the method that others are compared with, if any; the table begins with it.
        evaluate: flags of cli.evaluate, or None for no evaluation.
    """

    output: Path
    runs: list[Run]
    baseline: str | None
    evaluate: dict[str, Any] | None


def read_grid(path: Path) -> Grid:
    """Read the grid of a YAML file.

    Raises:
        UsageError: the file cannot be read, or an entry is wrong; the message names the first.
    """
    import yaml

    class KeysOnce(yaml.SafeLoader):
        """Refuses a key that occurs twice, where SafeLoader takes the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = Counter(str(key.value) for key, _ in node.value)
            twice = next((key for key, times in keys.items() if times > 1), None)
            if twice is not None:
                raise yaml.YAMLError(f"from line {node.start_mark.line + 1} on {twice} is given twice; leave one out.")
            return super().construct_mapping(node, deep)

    # The file and its entries.
    try:
        entries = yaml.load(path.read_text(encoding="utf-8"), KeysOnce)
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {one_line(error)}") from error
    _check_entries(path, entries)
    methods, settings = entries["methods"], entries.get("settings", {})
    # Flags, in each place that has some; seeds; baseline.
    groups = {"flags": entries["flags"], "evaluate": entries.get("evaluate")}
    groups |= {f"methods.{name}": flags for name, flags in methods.items()}
    for axis, values in settings.items():
        groups |= {f"settings.{axis}.{name}": flags for name, flags in values.items()}
    for place, flags in groups.items():
        _check_flags(path, place, flags)
    seeds = entries["seeds"]
    if not seeds or any(type(seed) is not int or seed < 0 for seed in seeds) or len({*seeds}) < len(seeds):
        raise UsageError(f"{path}: seeds must be whole numbers, each once, got {seeds}.")
    baseline = entries.get("baseline")
    if baseline is not None and baseline not in methods:
        raise UsageError(f"{path}: the baseline {baseline!r} is not among the methods {', '.join(methods)}.")
    # Methods × settings × seeds. A setting may not override a method, nor another setting.
    output = Path(entries["output"]).expanduser()
    runs = []
    for method, *chosen in itertools.product(methods, *settings.values()):
        flags = entries["flags"] | (methods[method] or {})
        set_by = dict.fromkeys(methods[method] or {}, f"methods.{method}")
        for (axis, values), name in zip(settings.items(), chosen, strict=True):
            for flag, value in (values[name] or {}).items():
                if flag in set_by:
                    raise UsageError(f"{path}: settings.{axis}.{name} and {set_by[flag]} both set {flag}.")
                set_by[flag] = f"settings.{axis}.{name}"
                flags[flag] = value
        label = "/".join([method, *chosen])
        for seed in seeds:
            folder = output / label / f"seed-{seed}"
            runs.append(Run(label, seed, folder, flags | {"train.seed": seed} | places(folder)))
    return Grid(output, runs, baseline, entries.get("evaluate"))


def words(flags: Mapping[str, Any]) -> list[str]:
    """The command line of ``flags``."""
    argv: list[str] = []
    for name, value in flags.items():
        if value is not False:
            values = [] if value is True else value if isinstance(value, list) else [value]
            argv += [f"--{name}", *map(str, values)]
    return argv


def places(folder: Path) -> dict[str, Any]:
    """The flags by which a run has its files in ``folder``."""
    return {
        "logger.metrics_path": str(folder / "metrics.jsonl"),
        "ckpt.output_dir": str(folder / "model"),
        "ckpt.path": str(folder / "checkpoints"),
    }


def _check_entries(path: Path, entries: Any) -> None:
    if not isinstance(entries, dict):
        raise UsageError(f"{path} must have {', '.join(_REQUIRED)}.")
    known = _REQUIRED | _OPTIONAL
    for name, value in entries.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."
            raise UsageError(f"{path}: {name!r} is not known; {hint}")
        if not isinstance(value, known[name]):
            kind = {str: "text", dict: "a mapping of names to entries", list: "a list"}[known[name]]
            raise UsageError(f"{path}: {name} must be {kind}, got {value!r}.")
    missing = [name for name in _REQUIRED if not entries.get(name)]
    if missing:
        raise UsageError(f"{path} lacks {' and '.join(missing)}.")
    settings = entries.get("settings", {})
    for axis, values in settings.items():
        if not isinstance(values, dict) or not values:
            raise UsageError(f"{path}: settings.{axis} must have values by name, each with its flags.")
    for name in itertools.chain(entries["methods"], *settings.values()):
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"{path}: the name {name!r} must be a folder name; use letters, digits and . + - _, but not . or _ "
                "first."
            )


def _check_flags(path: Path, place: str, flags: Any) -> None:
    if flags is None:
        return
    if not isinstance(flags, dict) or not all(isinstance(name, str) for name in flags):
        raise UsageError(f"{path}: {place} must be flags with their values, got {flags!r}.")
    for name, value in flags.items():
        if name.startswith("-"):
            raise UsageError(f"{path}: {place} has {name}; write flags without dashes, {name.lstrip('-')}.")
        if name in (_OURS_OF_EVALUATE if place == "evaluate" else OURS):
            raise UsageError(f"{path}: {place} sets {name}, which the experiment sets itself.")
        if name.startswith("logger.wandb.k") and value != "WANDB_API_KEY":
            raise UsageError(
                f"{path}: {place}.{name} must be WANDB_API_KEY, literally, with W&B's key in that variable of the "
                "environment; a run's folder and its page show its flags."
            )
        if not isinstance(value, str | int | float) and not (
            isinstance(value, list) and all(isinstance(item, str | int | float) for item in value)
        ):
            raise UsageError(f"{path}: {place}.{name} must be text, a number, a list of them or true, got {value!r}.")
