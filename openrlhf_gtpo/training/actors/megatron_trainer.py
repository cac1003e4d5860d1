"""The actor trainer on Megatron: OpenRLHF's replay buffer, losses and flags around Megatron's train step."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from torch import Tensor

from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.groups import is_first_replica, is_reporter
from openrlhf_gtpo.megatron.parallel.host import device
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.shared_prompts.balance import Prompt, computed_tokens
from openrlhf_gtpo.token_values import place
from openrlhf_gtpo.training.actors.actor_trainer import ActorTrainer
from openrlhf_gtpo.training.actors.micro_batches import fill_micro_batches, token_row
from openrlhf_gtpo.training.actors.optimizer_steps import (
    BadSteps,
    RowOrder,
    StepMetrics,
    count_actions,
    optimizer_steps,
    row_metrics,
)


class MegatronActorTrainer(ActorTrainer):
    """The trainer of one replica, with its replay buffer.

    Upstream's flags keep their meaning: ``--train.batch_size`` rows per optimizer step over all replicas,
    ``--train.max_epochs`` passes, its policy loss, KL loss and entropy bonus. A micro-batch holds up to
    ``--train.max_tokens_per_gpu`` tokens for each of the GPUs that share a sequence.
    """

    def __init__(self, strategy: Any, model: LoadedModel, trainer: Trainer, vllm_engines: list[Any] | None) -> None:
        super().__init__(
            strategy,
            model,
            None,  # no moving average of the weights
            None,
            None,
            micro_train_batch_size=strategy.arguments.train.micro_batch_size,
            vllm_engines=vllm_engines,
        )
        self.model = model
        self.megatron = trainer
        self._bad_steps = BadSteps("actor", self.args)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the whole replay buffer; returns upstream's metrics, averaged over the replicas."""
        metrics = StepMetrics(self.args)
        items = self.replay_buffer.items
        shuffle = np.random.default_rng(self.row_order().seed)
        report = None
        bad = 0
        steps = list(optimizer_steps(len(items), self.args, self._data_group(), device(), shuffle))
        for number, rows in enumerate(steps, start=1):
            step = _StepLoss(self, [items[row] for row in rows], kl_ctl)
            report = self.megatron.step(
                step.micro_batches,
                step.loss,
                with_entropy=step.with_entropy,
                another_follows=number < len(steps),
            )
            for experience, kept in zip(step.experiences, report.kept, strict=bool(report.kept)):
                metrics.add({**row_metrics(experience), **kept}, experience)
            metrics.add_tokens(step.computed, step.of_rows)
            bad += self._bad_steps.add(report.grad_norm, self.megatron.steps, metrics)
        self._bad_steps.check_weights((n, in_high_precision(p)) for n, p in self.model.stage.named_parameters())
        status = metrics.averages(len(steps), is_reporter())
        if report is not None:
            status |= {"actor_lr": report.next_lr, "actor_grad_norm": report.grad_norm, "actor_bad_steps": bad}
        return status

    def row_order(self) -> RowOrder:
        """Return the next training phase's order of rows: the same on all ranks of a replica, and after a resume."""
        train = self.args.train
        return RowOrder(train.batch_size, [train.seed, self.megatron.steps], train.shares_prompts)

    def _data_group(self) -> torch.distributed.ProcessGroup:
        return self.strategy.ds_device_mesh["dp"].get_group()

    @cached_property
    def _weights(self) -> FullWeights:
        return FullWeights(self.model, self.args.vllm.sync_bucket_mb * 2**20)

    def _send(self, version: int) -> None:
        # The other replicas have the same weights, so they send only to engines on their own GPUs.
        if self._colocated or is_first_replica():
            super()._send(version)

    def _weights_to_send(self) -> FullWeights:
        return self._weights


class _StepLoss:
    """The micro-batches of one optimizer step and their loss: a sum over micro-batches and replicas."""

    def __init__(self, trainer: MegatronActorTrainer, rows: list[Experience], kl_coef: float) -> None:
        args = trainer.args
        self.kl_coef = kl_coef
        self.trainer = trainer
        tokens_of = [
            token_row(row.sequences, row.attention_mask, row.action_mask, *(row.mm_train_inputs or ())) for row in rows
        ]
        budget = args.train.max_tokens_per_gpu * args.megatron.context_parallel_size
        prompts = [Prompt.of(*row[:2]) for row in tokens_of] if args.train.shares_prompts else None
        lengths = [len(row[0]) for row in tokens_of]
        members = fill_micro_batches(lengths, budget, prompts)
        self.computed = sum(computed_tokens(lengths, prompts, part) for part in members)
        self.of_rows = sum(lengths)
        self.micro_batches = [[tokens_of[i] for i in part] for part in members]
        self.experiences = [make_experience_batch([rows[i] for i in part], True) for part in members]
        self.with_entropy = args.actor.entropy_coef is not None
        self.totals = count_actions([row.action_mask for row in rows], trainer._data_group(), device())

    def loss(self, index: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Compute one micro-batch's part of the step's loss, and its metrics, from the (N,) values of its actions."""
        # Rows are copied from the host without waiting for what the device computes.
        mask = self.experiences[index].action_mask.bool().to(log_probs.device, non_blocking=True)
        rows = replace(self.experiences[index], action_mask=mask)
        entropy = None if entropy is None else place(entropy, mask)
        outputs = self.trainer.loss(rows, place(log_probs, mask), entropy, self.totals, self.kl_coef)
        return outputs.loss, outputs.metrics
