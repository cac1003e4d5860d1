"""Rollouts from dumps in place of sampled ones (``--train.replay_rollouts``)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import RolloutDump, find_dumps, read_dump, read_settings
from openrlhf_gtpo.token_values import TokenValues


class ReplayedSamples:
    """Stands in for upstream's samples generator and its prompt loader; a replay has neither.

    Args:
        args: the run's arguments, checked (see ``settings/replay.py``).

    Attributes:
        step: the step of the dump returned last.
        max_steps: optimizer steps of the dumped run, from which its learning rates follow.
        dispatched, dropped, at_end_of_episode: as in ``OrderedSamplesGenerator``; a replay is one episode.
    """

    dispatched = dropped = step = 0
    at_end_of_episode = False

    def __init__(self, args: SimpleNamespace) -> None:
        self._args = args
        found = {path: read_settings(path) for path in find_dumps(Path(args.train.replay_rollouts))}
        self._files = {settings["step"]: path for path, settings in found.items()}
        self.max_steps: int = next(iter(found.values()))["max_steps"]

    def __len__(self) -> int:
        return len(self._files)

    def state_dict(self) -> dict[str, Any]:
        return {}  # the step's number says where a replay goes on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore ``state``: a replay that goes on from a checkpoint has no use for the position in the prompts."""

    def begin_after(self, step: int) -> None:
        """Leave out the dumps up to ``step``, on which the checkpoint to go on from was trained. If none is left, the
        run only writes its model.

        Raises:
            TrainingStopped: the checkpoint is of a step after the last dump.
        """
        last = max(self._files)
        self._files = {number: path for number, path in self._files.items() if number > step}
        if step > last:
            raise TrainingStopped(
                f"--train.replay_rollouts {self._args.train.replay_rollouts} has no dump after step {step}, the step "
                f"of the checkpoint; its last dump is of step {last}. Give an earlier checkpoint with --ckpt.load_tag."
            )

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """Replace upstream's: return the next dump's rows, no pass rate, how many dumps that is, and True if it is the
        last."""
        if not self._files:  # in an episode after the first
            return [], None, 0, True
        self.step = min(self._files)
        dump = read_dump(self._files.pop(self.step))
        return read_samples(dump, self._args), None, 1, not self._files


def read_samples(dump: RolloutDump, args: SimpleNamespace) -> list[Experience]:
    """The rows of a dump, as ``OrderedSamplesGenerator`` gives them.

    Tokens, masks, outcomes and the engine's log-probs are the dump's. So are the old policy's entropies and log-probs,
    as ``sampler_values``, if ``args`` take those of the sampler; otherwise the actor computes them again.
    """
    lists = ("prompt_tokens", "tokens", "mask", "log_probs", "rollout_log_probs", "entropy")
    tables = {name: dump.columns[name].rows() for name in lists if dump.columns[name] is not None}
    dtype = getattr(torch, dump.settings["outcome_dtype"])
    samples = []
    for row, outcome in enumerate(dump.columns["outcome"].tolist()):
        prompt, tokens = tables["prompt_tokens"][row], tables["tokens"][row]

        def values(name: str) -> list[float]:
            return [0.0] * len(prompt) + tables[name][row]  # noqa: B023, called at once

        response = {
            "prompt": dump.columns["prompt"][row],
            "label": None,
            "observation_tokens": prompt + tokens,
            "action_ranges": [(at, at + 1) for at, acts in enumerate(tables["mask"][row], len(prompt)) if acts],
            "rollout_log_probs": values("rollout_log_probs") if "rollout_log_probs" in tables else None,
            "truncated": bool(dump.columns["truncated"][row]),
        }
        longest = max(args.data.max_len, len(prompt) + len(tokens))  # a dump's rows stay whole
        sample = SamplesGenerator._process_response_into_experience(None, response, max_len=longest)
        sample.rewards = torch.tensor([outcome], dtype=dtype)
        sample.info["reward"] = sample.rewards.clone()
        if dump.columns["guided"] is not None:
            sample.info[names.GUIDE_ROWS] = torch.tensor([float(dump.columns["guided"][row])])
        if args.rollout.entropy == "sampler":
            both = (torch.tensor([values(name)[1:]]) for name in ("log_probs", "entropy"))
            sample.sampler_values = TokenValues(*both)
        samples.append(sample)
    return samples
