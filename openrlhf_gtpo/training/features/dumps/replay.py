"""Rollouts from dumps instead of engines (``--train.replay_rollouts``)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import RolloutDump, find_dumps, read_dump, read_settings
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.feature import ControllerFeature
from openrlhf_gtpo.training.rows import Rollout, Row


class ReplayedSampler:
    """The sampler of a replay, and its loader of prompts. A replay is one episode.

    Args:
        args: the run's arguments, checked (see ``check_dumps``).

    Attributes:
        step: the step of the dump returned last.
        max_steps: optimizer steps of the dumped run, for its learning-rate schedule.
        drawn, of_pass: as in ``Sampler``.
    """

    drawn = of_pass = step = 0

    def __init__(self, args: Arguments) -> None:
        self._args = args
        assert args.train.replay_rollouts is not None
        settings = {path: read_settings(path) for path in find_dumps(Path(args.train.replay_rollouts))}
        self._files = {of_dump["step"]: path for path, of_dump in settings.items()}
        self.max_steps: int = next(iter(settings.values()))["max_steps"]

    def __len__(self) -> int:
        return len(self._files)

    def state_dict(self) -> dict[str, Any]:
        return {}  # a resumed replay continues after the step's number

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore ``state``: a resumed replay does not need the position in the prompts."""

    def begin_after(self, step: int) -> None:
        """Skip the dumps up to ``step``, which the checkpoint was trained on. If none is left, the run only writes its
        model.

        Raises:
            TrainingStopped: the checkpoint's step comes after the last dump.
        """
        last = max(self._files)
        self._files = {number: path for number, path in self._files.items() if number > step}
        if step > last:
            raise TrainingStopped(
                f"--train.replay_rollouts {self._args.train.replay_rollouts} has no dump after the checkpoint's step "
                f"{step}; its last dump is of step {last}. Give an earlier checkpoint with --ckpt.load_tag."
            )

    def sample(self) -> Rollout:
        """Return the rollout in the next dump."""
        if not self._files:  # in an episode after the first
            return Rollout([], 0, True)
        self.step = min(self._files)
        dump = read_dump(self._files.pop(self.step))
        return Rollout(read_rows(dump, self._args), 1, not self._files, step=self.step)


def read_rows(dump: RolloutDump, args: Arguments) -> list[Row]:
    """Return the rows of a dump as the sampler returned them.

    Tokens, masks, outcomes and the engine's log-probs come from the dump. If ``args`` take entropies from the sampler,
    so do the old policy's entropies and log-probs, as ``values``; otherwise the actor computes them again.
    """
    lists = ("prompt_tokens", "tokens", "mask", "log_probs", "rollout_log_probs", "entropy", "versions")
    tables = {name: dump.columns[name].rows() for name in lists if dump.columns[name] is not None}
    # Columns of responses, padded with the prompt's part.
    rows = []
    for number, outcome in enumerate(dump.columns["outcome"].tolist()):
        prompt, tokens = tables["prompt_tokens"][number], tables["tokens"][number]

        def values(name: str) -> np.ndarray:
            return np.array([0.0] * len(prompt) + tables[name][number], dtype=np.float32)  # noqa: B023, called at once

        row = Row(
            prompt=dump.columns["prompt"][number],
            label=None,
            number=number // args.rollout.n_samples_per_prompt,
            tokens=np.array(prompt + tokens, dtype=np.int64),
            mask=np.array([False] * len(prompt) + tables["mask"][number], dtype=bool),
            log_probs=values("rollout_log_probs") if "rollout_log_probs" in tables else None,
            reward=outcome,
            score=None,
            reward_dtype=getattr(torch, dump.settings["outcome_dtype"]),
            truncated=bool(dump.columns["truncated"][number]),
        )
        if dump.columns["guided"] is not None:
            row.off_policy = bool(dump.columns["guided"][number])
            row.metrics |= {names.GUIDE_ROWS: float(row.off_policy), names.OFF_POLICY_ROWS: float(row.off_policy)}
        if args.rollout.entropy == "sampler":
            row.values = TokenValues(values("log_probs"), values("entropy"))  # type: ignore[arg-type]
            if "versions" in tables:
                row.versions = np.array([-1] * len(prompt) + tables["versions"][number], dtype=np.int32)
        rows.append(row)
    return rows


class ReplayInController(ControllerFeature):
    """The replay in the controller: a step has its dump's number, and all dumps form one episode."""

    def sampler(self, run: Any) -> ReplayedSampler:
        self._replayed = ReplayedSampler(self.args)
        return self._replayed

    def restore(self, state: Mapping[str, Any], step: int) -> None:
        self._replayed.begin_after(step)

    def begin(self, run: Any) -> None:
        run.episode = 0  # whatever the checkpoint's episode
