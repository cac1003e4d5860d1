"""Times whole GTPO train steps of one model with random weights on Megatron: the old policy's log-probs and entropies, the
advantages, and an optimizer step on the token-level policy loss.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages, policy_surrogate
from openrlhf_gtpo.benchmarks.rates import seconds_of
from openrlhf_gtpo.benchmarks.synthetic import StepBatch, step_batch
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.megatron.fp8.options import Fp8Options
from openrlhf_gtpo.megatron.model.policy import ModelOptions
from openrlhf_gtpo.megatron.model.random_model import random_model
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.layout import Layout
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.trainer import OptimizerOptions, Trainer
from openrlhf_gtpo.platform.memory import PeakMemory
from openrlhf_gtpo.token_values import TokenValues

PHASES = ("old_policy", "advantages", "train")


@dataclass(frozen=True)
class Work:
    """What one step does.

    Fields:
        prompts, samples: groups, and responses to each.
        prompt_tokens, response_tokens: length of prompts, and the limit of responses, whose median is a sixth of it.
        max_tokens: of a micro-batch.
        recompute: see ``ModelOptions``.
    """

    prompts: int
    samples: int
    prompt_tokens: int
    response_tokens: int
    max_tokens: int
    recompute: str = "none"


@dataclass
class Measured:
    """Of one precision.

    Fields:
        seconds: phase to the seconds of each step.
        tokens: real tokens of each step, prompts included.
        grad_norms: of each step.
        peak_bytes: most memory of parameters, gradients, optimizer states and activations; None where it cannot be told.
    """

    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    tokens: list[int] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None


def measure(config: Any, fp8: Fp8Options | None, work: Work, repeat: int, seed: int) -> Measured:
    """In the one rank of the default group: ``repeat`` steps after one that is not counted. The same seed gives every
    precision the same weights and batches.

    Raises:
        LayoutError: this process's device cannot do the FP8 that is asked for.
        UsageError: the model does not fit into the device's memory.
    """
    groups.initialize(Layout(), seed)
    measured = Measured()
    memory = PeakMemory()
    try:
        options = ModelOptions(fp8=fp8, recompute=work.recompute)
        trainer = Trainer(random_model(config.to_dict(), options, seed), OptimizerOptions())
        for repetition in range(repeat + 1):
            batch = step_batch(
                work.prompts,
                work.samples,
                work.prompt_tokens,
                work.response_tokens,
                work.max_tokens,
                config.vocab_size,
                seed + repetition,
            )
            step = _Step(trainer, batch)
            seconds = {phase: seconds_of(getattr(step, phase)) for phase in PHASES}
            if repetition > 0:
                for phase in PHASES:
                    measured.seconds[phase].append(seconds[phase])
                measured.tokens.append(batch.tokens)
                measured.grad_norms.append(step.grad_norm)
    except torch.OutOfMemoryError as error:
        raise UsageError("out of memory; give fewer --layers or --max-tokens, or --recompute full.") from error
    measured.peak_bytes = memory.beyond()
    return measured


class _Step:
    """One step; its phases are called in the order of :data:`PHASES`."""

    def __init__(self, trainer: Trainer, batch: StepBatch) -> None:
        self._trainer = trainer
        self._batch = batch
        self._masks = [micro_batch.action_mask.bool() for micro_batch in batch.micro_batches]
        self._old: list[TokenValues] = []
        self._advantages: list[Tensor] = []
        self.grad_norm = 0.0

    def old_policy(self) -> None:
        self._old = schedule.forward(self._trainer.model, self._batch.micro_batches)

    def advantages(self) -> None:
        advantages = gtpo_advantages(
            _stacked([values.entropy for values in self._old]),
            _stacked(self._masks),
            self._batch.outcome,
            self._batch.group_ids,
            GTPOConfig(),
        )
        parts = advantages.split([len(mask) for mask in self._masks])
        self._advantages = [part[:, : mask.shape[1]] for part, mask in zip(parts, self._masks, strict=True)]

    def train(self) -> None:
        actions = sum(int(mask.sum()) for mask in self._masks)

        def loss(index: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, None]:
            given = (self._old[index].log_probs, self._advantages[index], self._masks[index])
            surrogate = policy_surrogate(log_probs, *(t.to(log_probs.device) for t in given), level="token")
            return surrogate.loss.sum() / actions, None

        self.grad_norm = self._trainer.step(self._batch.micro_batches, loss).grad_norm


def _stacked(parts: list[Tensor]) -> Tensor:
    """(b, A) tensors of different widths, which begin at the same column, as one (B, longest A), 0 at their ends."""
    longest = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts])
