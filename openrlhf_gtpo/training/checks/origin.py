"""The settings and data of the run that wrote a checkpoint, compared with the run that resumes from it.

A checkpoint and its manifest record them. The resuming run prints what differs and what that changes. It refuses what
cannot work, in settings before anything starts.
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
    """What another value of a recorded setting means for the resuming run."""

    change: str  # what it changes, as the end of a sentence
    stays: str = "no"  # whether it is refused: "no"; "ahead", if the checkpoint has rows sampled with the old; "yes"


_SETTINGS: Mapping[str, _Kept] = {
    "rollout.n_samples_per_prompt": _Kept("the group size and the learning-rate schedule change", "ahead"),
    "rollout.temperature": _Kept("responses, log-probs and entropies have another temperature", "ahead"),
    "rollout.top_p": _Kept("responses come from another part of the distribution", "ahead"),
    "rollout.entropy": _Kept("the old policy's entropies have another source", "ahead"),
    "data.dataloader_num_workers": _Kept(
        "the recorded place in the data is for the old number of loader processes", "yes"
    ),
    "data.max_len": _Kept("earlier responses keep their length"),
    "rollout.max_new_tokens": _Kept("earlier responses keep their length"),
    "reward.remote_url": _Kept("earlier responses keep their rewards"),
    "train.agent_func_path": _Kept("earlier responses keep their turns and rewards"),
}
_ELSEWHERE = ("ckpt", "logger")  # where a run writes, with the key of W&B


class Origin:
    """This run's settings and data.

    Args:
        args: the run's arguments.
        prompts, held_out: ``Prompts``; None if there are none, or none yet.
    """

    def __init__(self, args: Arguments, prompts: Any = None, held_out: Any = None) -> None:
        self._args = args
        self._settings = _settings(args)
        self._data = {name: rows for name, rows in ((_PROMPTS, prompts), (_HELD_OUT, held_out)) if rows is not None}
        self._known = {name: _known_by(rows) for name, rows in self._data.items()}

    def state(self, drawn: int, ahead: int) -> dict[str, Any]:
        """Return what a checkpoint records, in values for JSON.

        Args:
            drawn: rows drawn in the current pass over the prompts.
            ahead: prompts that were drawn but not trained on yet.
        """
        return {"settings": self._settings, "data": self._known, "drawn": drawn, "ahead": ahead}

    def has_other_questions(self, saved: Mapping[str, Any]) -> bool:
        """True if evaluations before the checkpoint used other rows."""
        before = saved.get("data", {})
        return _HELD_OUT in before and before[_HELD_OUT] != self._known.get(_HELD_OUT, before[_HELD_OUT])

    def differences(self, saved: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each difference from the run that wrote the checkpoint.

        Args:
            saved: the checkpoint's :meth:`state`; empty if an earlier version wrote it.

        Raises:
            UsageError: the checkpoint's rows, or its place in the data, do not fit this run.
        """
        # Settings: any may change unless the checkpoint has rows, or a place in the data, that depend on it.
        for name, now in self._settings.items():
            settings = saved.get("settings", {})
            before = settings.get(name, settings.get(name.replace("normalize_", "normalise_"), now))  # 0.1's spelling
            if now == before:
                continue
            ahead, sentence = saved["ahead"], f"--{name} is now {_shown(now)}, was {_shown(before)}"
            kept = _SETTINGS.get(name, _Kept(""))
            sentence += f": {kept.change}" if kept.change else ""
            if kept.stays == "yes" or (kept.stays == "ahead" and ahead):
                holding = f", and the checkpoint holds {ahead} prompts that were sampled ahead" if ahead else ""
                raise UsageError(f"{sentence}{holding}; give {_shown(before)} to resume from it.")
            yield f"{sentence}."
        # Data: rows may be appended, or replaced where no pass over them is half done.
        for name, rows in self._data.items():
            before = saved.get("data", {}).get(name, self._known[name])
            if before == self._known[name]:
                continue
            counts, drawn = f"{name} now has {len(rows)} rows, had {before['rows']}", saved["drawn"]
            if name == _HELD_OUT:
                yield f"{counts}, and they differ: held-out numbers, and the best, are for other questions now."
            elif len(rows) > before["rows"] and rows.digest(before["rows"]) == before["digest"]:
                yield (
                    f"{counts}: appended rows are drawn from the next episode on (--train.num_episodes "
                    f"{self._args.train.num_episodes}); the learning-rate schedule changes."
                )
            elif 0 < drawn < before["rows"]:
                raise UsageError(
                    f"{counts}, and the old rows do not come first. {drawn} of them were drawn in this episode, so "
                    "some rows would be drawn twice and others never. Give the same data, with new rows only at the "
                    "end, or start over from the model in another folder."
                )
            else:
                yield f"{counts}, and they differ: the next episode draws them; the learning-rate schedule changes."


def _settings(args: Arguments) -> dict[str, Any]:
    """Return all values by flag, as JSON gives them back, except where the run writes."""
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
