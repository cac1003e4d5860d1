"""Rollout batches of random tokens for benchmarks: what counts are the lengths of their rows."""

from types import SimpleNamespace

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from transformers import AutoConfig

# Of log-lengths. The longest of some hundred responses is then about ten times the median, as in runs of reasoning
# models.
_TAIL = 0.9


def uniform_lengths(args: SimpleNamespace, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, all from half of ``longest`` to ``longest`` alike."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(longest // 2, longest + 1, (_rows(args),), generator=generator)


def long_tailed_lengths(args: SimpleNamespace, longest: int, seed: int) -> Tensor:
    """(B,) response lengths, log-normal with median ``longest / 6`` and cut off at ``longest``, as by a token limit."""
    generator = torch.Generator().manual_seed(seed)
    lengths = longest / 6 * (_TAIL * torch.randn(_rows(args), generator=generator)).exp()
    return lengths.round().clamp(1, longest).long()


def rollout(args: SimpleNamespace, prompt_tokens: int, lengths: Tensor, seed: int) -> list[Experience]:
    """One experience a row, half of the rows successful in every group."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = AutoConfig.from_pretrained(args.actor.model_name_or_path).vocab_size
    samples = []
    for row, length in enumerate(lengths.tolist()):
        total = prompt_tokens + length
        mask = torch.zeros(1, total - 1, dtype=torch.long)
        mask[:, prompt_tokens - 1 :] = 1
        reward = torch.tensor([float(row % 2)])
        samples.append(
            Experience(
                sequences=torch.randint(0, vocabulary, (1, total), generator=generator),
                attention_mask=torch.ones(1, total, dtype=torch.long),
                action_mask=mask,
                rewards=reward,
                scores=reward.clone(),
                prompts=[""],
                labels=[""],
                response_length=torch.tensor([length]),
                total_length=torch.tensor([float(total)]),
                truncated=torch.tensor([False]),
                info={"reward": reward.clone()},
            )
        )
    return samples


def _rows(args: SimpleNamespace) -> int:
    return int(args.rollout.batch_size * args.rollout.n_samples_per_prompt)
