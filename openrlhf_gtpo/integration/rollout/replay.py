"""Rollouts from dumps in place of sampled ones (``--train.replay_rollouts``)."""

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
    """Stands in for upstream's samples generator and its prompt loader; a replay has neither.

    Args:
        args: the run's arguments, checked (see ``command_line/replay.py``).

    Attributes:
        step: the step of the dump returned last.
        max_steps: optimizer steps of the dumped run, from which its learning rates follow.
        dispatched, dropped, tokens, at_end_of_episode: as in ``OrderedSamplesGenerator``; a replay is one episode.
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
        return {}  # the step's number says where a replay goes on

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore ``state``: a replay that goes on from a checkpoint has no use for the position in the prompts."""

    def begin_after(self, step: int) -> None:
        """Leave out the dumps up to ``step``, on which the checkpoint to go on from was trained.

        Raises:
            TrainingStopped: no dump is left.
        """
        last = max(self._files)
        self._files = {number: path for number, path in self._files.items() if number > step}
        if not self._files:
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
