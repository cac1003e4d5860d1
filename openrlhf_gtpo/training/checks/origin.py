"""What a run that goes on from a checkpoint has in common with the run that wrote it: settings and data.

A checkpoint keeps them, also in its manifest. A run that goes on compares its own with them: what differs is named,
with what it does, and what cannot be is refused, of settings before anything starts.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.settings.flags import DERIVED
from openrlhf_gtpo.training.settings.frozen import by_flag

ORIGIN = "origin"  # in a checkpoint, and its manifest

_PROMPTS, _HELD_OUT = "--data.prompt_dataset", "--eval.dataset"


class _Kept(NamedTuple):
    """What a setting of the checkpoint means for a run that goes on."""

    change: str  # what another value does, as the end of a sentence
    stays: str = "no"  # whether it has to stay: "no"; "ahead", while rows are there that were sampled with it; "yes"


_SETTINGS: Mapping[str, _Kept] = {
    "rollout.n_samples_per_prompt": _Kept("groups have another size, and learning rates another schedule", "ahead"),
    "rollout.temperature": _Kept("responses, log-probs and entropies are of another temperature", "ahead"),
    "rollout.top_p": _Kept("responses are drawn from another part of the distribution", "ahead"),
    "rollout.entropy": _Kept("the old policy's entropies come from elsewhere", "ahead"),
    "data.dataloader_num_workers": _Kept("the place in the data is that of a loader with other processes", "yes"),
    "data.max_len": _Kept("what was sampled before keeps its length"),
    "rollout.max_new_tokens": _Kept("what was sampled before keeps its length"),
    "reward.remote_url": _Kept("what was sampled before keeps its rewards"),
    "train.agent_func_path": _Kept("what was sampled before keeps its turns and rewards"),
}
_ELSEWHERE = ("ckpt", "logger")  # where a run writes, with the key of W&B


class Origin:
    """This run's settings and data.

    Args:
        args: its arguments.
        prompts, held_out: data sets of ``Prompts``; None for none, or none yet.
    """

    def __init__(self, args: Arguments, prompts: Any = None, held_out: Any = None) -> None:
        self._args = args
        self._settings = _settings(args)
        self._data = {name: rows for name, rows in ((_PROMPTS, prompts), (_HELD_OUT, held_out)) if rows is not None}
        self._known = {name: _known_by(rows) for name, rows in self._data.items()}

    def state(self, drawn: int, ahead: int) -> dict[str, Any]:
        """For a checkpoint, in values for JSON.

        Args:
            drawn: rows that were drawn in the pass over the prompts that is under way.
            ahead: prompts that were drawn and not trained on, with their rows.
        """
        return {"settings": self._settings, "data": self._known, "drawn": drawn, "ahead": ahead}

    def has_other_questions(self, saved: Mapping[str, Any]) -> bool:
        """Whether evaluations before the checkpoint were of other rows."""
        before = saved.get("data", {})
        return _HELD_OUT in before and before[_HELD_OUT] != self._known.get(_HELD_OUT, before[_HELD_OUT])

    def differences(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each thing that is not as it was when the checkpoint was written.

        Args:
            saved: its :meth:`state`; empty if an earlier version wrote it.

        Raises:
            UsageError: its rows, or its place in the data, do not fit this run.
        """
        for name, now in self._settings.items():
            settings = saved.get("settings", {})
            before = settings.get(name, settings.get(name.replace("normalize_", "normalise_"), now))  # 0.1's spelling
            if now == before:
                continue
            ahead, sentence = saved["ahead"], f"--{name} is {_shown(now)}, and was {_shown(before)}"
            kept = _SETTINGS.get(name, _Kept(""))
            sentence += f": {kept.change}" if kept.change else ""
            if kept.stays == "yes" or (kept.stays == "ahead" and ahead):
                holding = f", and the checkpoint has {ahead} prompts that were sampled ahead" if ahead else ""
                raise UsageError(f"{sentence}{holding}; give {_shown(before)} to go on from it.")
            yield f"{sentence}."
        for name, rows in self._data.items():
            before = saved.get("data", {}).get(name, self._known[name])
            if before == self._known[name]:
                continue
            counts, drawn = f"{name} has {len(rows)} rows, and had {before['rows']}", saved["drawn"]
            if name == _HELD_OUT:
                yield f"{counts}, not the same: held-out numbers are of other questions now, and so is the best."
            elif len(rows) > before["rows"] and rows.digest(before["rows"]) == before["digest"]:
                yield (
                    f"{counts}, which come first: those that were appended are drawn from the next episode on, of "
                    f"--train.num_episodes {self._args.train.num_episodes}; learning rates have another schedule."
                )
            elif 0 < drawn < before["rows"]:
                raise UsageError(
                    f"{counts}, which do not come first; {drawn} of those were drawn in this episode, so that some "
                    "rows would be drawn twice and others never. Give the data as they were, to which rows may be "
                    "appended, or start anew from the model, in another folder."
                )
            else:
                yield f"{counts}, not the same: the next episode draws them, and learning rates have another schedule."


def _settings(args: Arguments) -> dict[str, Any]:
    """The values of all flags but those that say where a run writes, by name, as JSON gives them back."""
    found = {
        name: value
        for name, value in by_flag(args).items()
        if not name.startswith(_ELSEWHERE) and (name not in DERIVED or name in _SETTINGS)
    }
    return json.loads(json.dumps(found, default=str))


def _known_by(rows: Any) -> dict[str, Any]:
    return {"rows": len(rows), "digest": rows.digest(len(rows))}


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
