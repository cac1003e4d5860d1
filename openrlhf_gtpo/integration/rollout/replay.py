"""Rollouts of dumps in the place of sampled ones (``--train.replay_rollouts``)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import RolloutDump, find_dumps, read_dump, read_settings
from openrlhf_gtpo.token_values import TokenValues


class ReplayedSamples:
    """Stands for upstream's generator of samples and for its loader of prompts, which a replay has neither of.

    Args:
        args: the run's arguments, checked (see ``command_line/replay.py``).

    Attributes:
        step: of the dump that was given last.
        max_steps: optimizer steps of the run that was dumped, from which its learning rates follow.
        dispatched, dropped, tokens, at_end_of_episode: as of ``OrderedSamplesGenerator``; a replay is one episode.
    """

    dispatched = dropped = tokens = step = 0
    at_end_of_episode = False

    def __init__(self, args: SimpleNamespace) -> None:
        self._args = args
        found = {path: read_settings(path) for path in find_dumps(Path(args.train.replay_rollouts))}
        self._files = {settings["step"]: path for path, settings in found.items()}
        self.max_steps: int = next(iter(found.values()))["max_steps"]

    def __len__(self) -> int:
        return len(self._files)

    def state_dict(self) -> dict[str, Any]:
        return {}  # where a replay goes on is in the step's number

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A replay that goes on from a checkpoint of training has no use for where the prompts were."""

    def begin_after(self, step: int) -> None:
        """Leave out the dumps up to ``step``, which the checkpoint that is gone on from was trained on.

        Raises:
            TrainingStopped: no dump is left.
        """
        last = max(self._files)
        self._files = {number: path for number, path in self._files.items() if number > step}
        if not self._files:
            raise TrainingStopped(
                f"--train.replay_rollouts {self._args.train.replay_rollouts} has no dump after step {step}, which the "
                f"checkpoint is of; its last one is of step {last}. Give an earlier one by --ckpt.load_tag."
            )

    def generate_samples(self, **generate_kwargs: Any) -> tuple[list[Experience], float | None, int, bool]:
        """As upstream's, of the next dump: rows, no share that passed a filter, 1 for a dump, whether none is left."""
        if not self._files:  # of an episode after the first
            return [], None, 0, True
        self.step = min(self._files)
        dump = read_dump(self._files.pop(self.step))
        return read_samples(dump, self._args), None, 1, not self._files


def read_samples(dump: RolloutDump, args: SimpleNamespace) -> list[Experience]:
    """The rows of a dump, as ``OrderedSamplesGenerator`` gives them.

    Tokens, masks, outcomes and what the engine said of its tokens are the dump's. Entropies and log-probs of the old
    policy are, as ``sampler_values``, where ``args`` take the sampler's; else the actor computes them again.
    """
    lists = ("prompt_tokens", "tokens", "mask", "log_probs", "rollout_log_probs", "entropy")
    tables = {name: dump.columns[name].rows() for name in lists if dump.columns[name] is not None}
    dtype = getattr(torch, dump.settings["outcome_dtype"])
    samples = []
    for row, outcome in enumerate(dump.columns["outcome"].tolist()):
        prompt, tokens = tables["prompt_tokens"][row], tables["tokens"][row]
        before = len(prompt) - 1  # columns of the action mask

        def columns(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.tensor([[0] * before + tables[name][row]], dtype=dtype)  # noqa: B023, called at once

        mask = columns("mask", torch.long)
        actions = mask[0].nonzero()
        reward, length = torch.tensor([outcome], dtype=dtype), len(prompt) + len(tokens)
        sample = Experience(
            sequences=torch.tensor([prompt + tokens]),
            attention_mask=torch.ones(1, length, dtype=torch.long),
            action_mask=mask,
            rollout_log_probs=columns("rollout_log_probs") if "rollout_log_probs" in tables else None,
            prompts=[dump.columns["prompt"][row]],
            labels=[None],
            images=[None],
            mm_train_inputs=[None],
            rewards=reward,
            response_length=torch.tensor([int(actions[-1] - actions[0]) + 1 if len(actions) else 0]),
            truncated=torch.tensor([bool(dump.columns["truncated"][row])]),
            total_length=torch.tensor([float(length)]),
            info={"reward": reward.clone(), "response_clip_ratio": torch.tensor([length >= args.data.max_len])},
        )
        if dump.columns["guided"] is not None:
            sample.info[names.GUIDE_ROWS] = torch.tensor([float(dump.columns["guided"][row])])
        if args.rollout.entropy == "sampler":
            sample.sampler_values = TokenValues(columns("log_probs"), columns("entropy"))
        samples.append(sample)
    return samples
