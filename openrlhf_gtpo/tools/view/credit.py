"""Computes the advantages of dumped rollouts with any estimator, with the parts that the page shows."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf_gtpo.algorithms import ESTIMATORS, CreditParts, success
from openrlhf_gtpo.report.rollouts import RolloutDump, Tokens


@dataclass(frozen=True)
class Method:
    """An estimator with its settings and its name on the page."""

    label: str
    name: str
    config: Any


class Credit(NamedTuple):
    """The advantages of a dump's B rows with up to T tokens, and their parts."""

    success: Tensor  # (B,) bool
    parts: CreditParts | None  # None if the estimator has none
    advantages: Tensor  # (B, T), before a KL reward and --reward.clip_range, which the dump may include


def read_methods(texts: Sequence[str], dump: RolloutDump) -> list[Method]:
    """Parse methods, NAME or NAME:FIELD=VALUE:...; a run that used NAME provides the other fields.

    Without ``texts``, the run's own estimator comes first, then those with ``parts``, which the page can show.

    Raises:
        ValueError: a name, field or value is unknown.
    """
    run_estimator = dump.settings["estimator"]
    methods = []
    shown = [name for name, kind in ESTIMATORS.items() if kind.parts or name == run_estimator]
    for text in texts or sorted(shown, key=lambda name: name != run_estimator):
        name, *pairs = text.split(":")
        if name not in ESTIMATORS:
            raise ValueError(f"Expected --estimators of {', '.join(ESTIMATORS)}, got {name!r}.")
        kind = ESTIMATORS[name].config
        settings = _run_settings(kind, dump.settings["config"] or {}) if name == run_estimator else {}
        types = typing.get_type_hints(kind)
        for pair in pairs:
            field, _, value = pair.replace("normalise_", "normalize_").partition("=")
            if field not in types:
                raise ValueError(f"--estimators {text}: {name} has no {field!r}; it has {', '.join(types)}.")
            settings[field] = _value(text, types[field], value)
        try:
            methods.append(Method(text, name, kind(**settings)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"--estimators {text}: {error}") from error
    return methods


def _run_settings(kind: Any, config: dict[str, Any]) -> dict[str, Any]:
    """A run's settings without its variant's defaults, which another variant may reject."""
    variant = {"variant": config["variant"]} if "variant" in config else {}
    config = {name.replace("normalise_", "normalize_"): value for name, value in config.items()}  # 0.1's spelling
    former = {("peers", "all")}  # a setting of earlier versions, with its default
    return variant | dict(config.items() - vars(kind(**variant)).items() - former)


def _value(text: str, kind: Any, value: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        return value  # the settings check the value
    kinds: dict[Any, Any] = {bool: {"true": True, "false": False}.__getitem__, float: float}
    try:
        return kinds[kind](value)
    except (KeyError, ValueError):
        expected = "true or false" if kind is bool else f"a {kind.__name__}"
        raise ValueError(f"--estimators {text}: expected {expected}, got {value!r}.") from None


def credit(dump: RolloutDump, method: Method) -> Credit:
    """Compute a dump's advantages with ``method``.

    Raises:
        ValueError: the dump has no entropies, or the estimator rejects it, for example because of a group of one row.
    """
    columns = dump.columns
    if columns["entropy"] is None:
        raise ValueError(
            "the dump has no entropies (train with --logger.entropy_enable to record them for every estimator)."
        )
    entropy, mask = padded(columns["entropy"]), padded(columns["mask"])
    outcome = torch.from_numpy(columns["outcome"].copy()).to(getattr(torch, dump.settings["outcome_dtype"]))
    penalty = torch.from_numpy(columns["length_penalty"].copy())
    groups = torch.from_numpy(columns["group"].copy())
    batch = (entropy, mask, outcome, groups, method.config, penalty if penalty.any() else None)
    estimator = ESTIMATORS[method.name]
    succeeded = success(outcome, method.config.success_threshold)
    return Credit(succeeded, estimator.parts and estimator.parts(*batch), estimator.advantages(*batch))


def padded(column: Tokens) -> Tensor:
    """Pad a list column to (B, T), 0 past a row's end."""
    lengths = np.diff(column.offsets)
    rows = np.zeros((len(lengths), max(1, lengths.max(initial=0))), column.values.dtype)
    rows[np.arange(rows.shape[1]) < lengths[:, None]] = column.values
    return torch.from_numpy(rows)
