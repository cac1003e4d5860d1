"""Rollout batches of random tokens for benchmarks: what counts are the lengths of their rows."""

from types import SimpleNamespace

import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch import Tensor
from transformers import AutoConfig


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
