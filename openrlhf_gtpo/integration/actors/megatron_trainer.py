"""OpenRLHF's actor trainer on Megatron: its replay buffer, losses and flags around Megatron's train step."""

from dataclasses import fields
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from openrlhf.models import aggregate_loss
from openrlhf.models.utils import compute_approx_kl, masked_mean
from openrlhf.trainer.ppo_utils.experience import Experience, make_experience_batch
from torch import Tensor

from openrlhf_gtpo.integration.actors.actor_trainer import ActorTrainer
from openrlhf_gtpo.integration.actors.micro_batches import fill_micro_batches, token_row
from openrlhf_gtpo.integration.actors.optimizer_steps import (
    BadSteps,
    RowOrder,
    StepMetrics,
    count_actions,
    optimizer_steps,
    poisoned,
)
from openrlhf_gtpo.megatron.fp8.weights import in_high_precision
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.model.weights import FullWeights
from openrlhf_gtpo.megatron.parallel.groups import is_first_replica, is_reporter
from openrlhf_gtpo.megatron.parallel.host import device
from openrlhf_gtpo.megatron.train.trainer import Trainer
from openrlhf_gtpo.token_values import place

_READ = ("action_mask", "advantages", "action_log_probs", "base_action_log_probs", "rollout_log_probs")


class MegatronActorTrainer(ActorTrainer):
    """Holds the replay buffer of this replica and trains ``model`` on it.

    Upstream's flags keep their meaning: ``--train.batch_size`` rows per optimizer step over all replicas,
    ``--train.max_epochs`` passes, its policy loss, KL loss and entropy bonus. Micro-batches are filled up to
    ``--train.max_tokens_per_gpu`` tokens for each of the GPUs that share a sequence.
    """

    def __init__(self, strategy: Any, model: LoadedModel, trainer: Trainer, vllm_engines: list[Any] | None) -> None:
        super().__init__(
            strategy,
            model,
            None,  # no moving average of the weights
            None,
            None,
            micro_train_batch_size=strategy.args.train.micro_batch_size,
            vllm_engines=vllm_engines,
        )
        self.model = model
        self.megatron = trainer
        self._bad_steps = BadSteps("actor", self.args)

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on everything in the replay buffer; returns upstream's metrics, averaged over the replicas."""
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
                metrics.add(_of_rows(experience) | kept, experience)
            bad += self._bad_steps.add(report.grad_norm, self.megatron.steps, metrics)
        self._bad_steps.check_weights((n, in_high_precision(p)) for n, p in self.model.stage.named_parameters())
        status = metrics.averages(len(steps), is_reporter())
        if report is not None:
            status |= {"actor_lr": report.next_lr, "actor_grad_norm": report.grad_norm, "actor_bad_steps": bad}
        return status

    def row_order(self) -> RowOrder:
        """The order of rows in the next training phase: the same on every rank of a replica, and after a resume."""
        return RowOrder(self.args.train.batch_size, [self.args.train.seed, self.megatron.steps])

    def _data_group(self) -> torch.distributed.ProcessGroup:
        return self.strategy.ds_device_mesh["dp"].get_group()

    @cached_property
    def _weights(self) -> FullWeights:
        return FullWeights(self.model, self.args.vllm.sync_bucket_mb * 2**20)

    def _send(self) -> None:
        # Other replicas have the same weights, and serve only the engines on their own GPUs.
        if self._colocated or is_first_replica():
            super()._send()

    def _weights_to_send(self) -> FullWeights:
        return self._weights


class _StepLoss:
    """The micro-batches of one optimizer step and their loss: a sum over micro-batches and replicas."""

    def __init__(self, trainer: MegatronActorTrainer, rows: list[Experience], kl_ctl: float) -> None:
        self.args: SimpleNamespace = trainer.args
        self.kl_ctl = kl_ctl
        self.trainer = trainer
        tokens_of = [token_row(row.sequences, row.attention_mask, row.action_mask) for row in rows]
        budget = self.args.train.max_tokens_per_gpu * self.args.megatron.context_parallel_size
        members = fill_micro_batches([len(tokens) for tokens, _ in tokens_of], budget)
        self.micro_batches = [[tokens_of[i] for i in part] for part in members]
        self.experiences = [make_experience_batch([rows[i] for i in part], True) for part in members]
        self.with_entropy = self.args.actor.entropy_coef is not None
        tokens, samples = count_actions([row.action_mask for row in rows], trainer._data_group(), device())
        self._totals = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": samples}

    def loss(self, index: int, log_probs: Tensor, entropy: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's part of the step's loss, and its metrics, from (N,) values of its actions."""
        # Copy from the host's rows what the loss reads, without waiting for what the device computes.
        given = {name: getattr(self.experiences[index], name) for name in _READ}
        experience = SimpleNamespace(
            **{name: None if v is None else v.to(log_probs.device, non_blocking=True) for name, v in given.items()}
        )
        mask = experience.action_mask
        log_probs = place(log_probs, mask.bool())
        self.trainer._tell(self.experiences[index])
        if entropy is not None:
            entropy = place(entropy, mask.bool())
            if "entropy" in self.trainer.reads:
                self.trainer.actor_loss_fn.given["entropy"] = entropy.detach()
        policy, clip_ratio, approx_kl, vllm_kl, filtered = self.trainer.actor_loss_fn(
            log_probs,
            experience.action_log_probs,
            experience.advantages,
            action_mask=mask,
            rollout_log_probs=experience.rollout_log_probs,
            **self._totals,
        )
        metrics = {"policy_loss": policy, "ppo_clip_ratio": clip_ratio, "ppo_kl": approx_kl}
        metrics |= self.trainer.guide_ratios.metrics()
        if vllm_kl is not None:
            metrics |= {"vllm_kl": vllm_kl, "is_filter_ratio": filtered}
        total = policy
        if self.args.algo.kl.use_loss:
            kl, difference = self._kl(experience, log_probs)
            total = total + kl * self.kl_ctl
            metrics |= {"kl": kl, "logprobs_diff": difference}
        if entropy is not None:
            bonus = aggregate_loss(entropy, mask, **self._totals)
            if self.args.actor.entropy_coef:  # 0 only logs it, without the LM head's second gradient
                total = total - bonus * self.args.actor.entropy_coef
            metrics["entropy_loss"] = bonus
        return poisoned(total), {name: value.detach() for name, value in metrics.items()}

    def _kl(self, experience: SimpleNamespace, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        if self.args.algo.kl.init_coef <= 0:
            return log_probs.new_zeros(()), log_probs.new_zeros(())
        kl = compute_approx_kl(
            log_probs,
            experience.base_action_log_probs,
            log_probs_old=experience.action_log_probs,
            kl_estimator=self.args.algo.kl.estimator,
            unbiased_gradient=self.args.algo.kl.unbiased_gradient,
        )
        difference = masked_mean(log_probs.float() - experience.base_action_log_probs.float(), experience.action_mask)
        return aggregate_loss(kl, experience.action_mask, **self._totals), difference


def _of_rows(experience: Experience) -> dict[str, Tensor]:
    """The values that OpenRLHF logs for each row: tensors and lists of ``info``, and the per-episode fields."""
    found: dict[str, Tensor] = {}
    for name, value in experience.info.items():
        if isinstance(value, list):
            found[name] = torch.tensor([float(one) for one in value])
        elif isinstance(value, Tensor):
            found[name] = value
    for field in fields(Experience):
        value = getattr(experience, field.name)
        if field.name in {"rewards", "scores"} or not Experience.is_episode_tensor_field(field.name):
            continue
        if isinstance(value, Tensor) and field.name not in found:
            found[field.name] = value
    return found
