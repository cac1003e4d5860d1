"""Ray actors with a policy, and with the critic of upstream's `gae`, on DeepSpeed, and their trainers."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from typing import Any

import ray
import torch
from openrlhf.models import actor as upstream_model
from openrlhf.models.utils import masked_mean
from openrlhf.trainer.ray import ppo_actor, ppo_critic
from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer
from openrlhf.utils.vlm_utils import merge_mm_train_inputs

from openrlhf_gtpo import platform
from openrlhf_gtpo.platform.memory import ReportsPeakMemory
from openrlhf_gtpo.report import names
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.actors import adapters
from openrlhf_gtpo.training.actors.actor_trainer import ActorTrainer, keep_trying
from openrlhf_gtpo.training.actors.optimizer_steps import MicroBatch, WholeSteps, row_metrics
from openrlhf_gtpo.training.actors.policy_model import PolicyModel
from openrlhf_gtpo.training.actors.strategy import averages, gathered
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.credit.loss import LossFeature, poisoned
from openrlhf_gtpo.weight_sync.buckets import WIRE_DTYPE, ParameterMeta, TensorBuckets, Weights

_UpstreamPolicyActor: Any = ppo_actor.PolicyModelActor.__ray_metadata__.modified_class
_UpstreamCriticActor: Any = ppo_critic.CriticModelActor.__ray_metadata__.modified_class


_AVERAGES = "averages"  # in a checkpoint's client states; under ZeRO-3 every rank has a file with its own


class DeepspeedActorTrainer(WholeSteps, ActorTrainer):
    """The actor trainer on DeepSpeed, which trains a whole optimizer step at a time."""

    def ppo_train(self, kl_ctl: float) -> dict[str, float]:
        """Train on the whole replay buffer; returns upstream's metrics."""
        return self.train(partial(self.train_micro_batch, kl_coef=kl_ctl))

    def train_micro_batch(self, batch: MicroBatch, kl_coef: float) -> dict[str, torch.Tensor]:
        """Run forward and backward pass of a micro-batch, and after a step's last one the optimizer step; returns the
        metrics of loss and rows. Replaces upstream's ``training_step``."""
        rows = batch.experience
        num_actions = rows.action_mask.shape[1]

        # Forward.
        images = {}
        if rows.mm_train_inputs and getattr(self.actor, "is_vlm", False):
            images = merge_mm_train_inputs(rows.mm_train_inputs, rows.sequences.device)
        self.actor.train()
        log_probs, output = self.actor(
            rows.sequences,
            rows.action_mask,
            attention_mask=rows.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            packed_seq_lens=None,
            return_entropy=self.args.actor.entropy_coef is not None,
            **images,
        )

        # Loss. The router's loss comes as a mean over these rows, and counts by their part of the step.
        entropy = None if self.args.actor.entropy_coef is None else output.entropy[:, -num_actions:]
        router_loss = None
        if self.aux_loss:
            router_loss = output.aux_loss * self.args.actor.aux_loss_coef * batch.row_share
        outputs = self.loss(rows, log_probs, entropy, batch.totals, kl_coef, router_loss)

        # Backward and, at the end of a step, the new weights and their moving average.
        self.strategy.backward(outputs.loss, self.actor, self.actor_optim)
        if batch.last:
            self.strategy.optimizer_step(self.actor_optim, self.actor, self.actor_scheduler, name="actor")
            if self.ema_model:
                self.strategy.moving_average(self.actor, self.ema_model, self.ema_beta, "cuda")
        return {**row_metrics(rows), **outputs.metrics}

    def _weights_to_send(self) -> Weights:
        return TensorBuckets(self._metas, self._full_tensors(), self.args.vllm.sync_bucket_mb * 2**20)

    @cached_property
    def _metas(self) -> list[ParameterMeta]:
        metas = []
        for part in self._parts_to_send():
            shape = getattr(part.weight, "ds_shape", None)  # ZeRO-3's
            if shape is None:
                with gathered(self.args, self.actor.model.module, [part.weight]):
                    shape = part.weight.shape
            metas.append(ParameterMeta(part.name, tuple(shape)))
        return metas

    def _parts_to_send(self) -> list[adapters.Part]:
        frozen_too = not getattr(self.actor, "is_vlm", False)
        parts = adapters.parts(self.actor.model.module)
        return [part for part in parts if part.weight.requires_grad or part.adapter or frozen_too]

    def _full_tensors(self) -> Iterator[torch.Tensor]:
        for part in self._parts_to_send():
            with gathered(self.args, self.actor.model.module, part.parameters):
                yield part.value(WIRE_DTYPE)


class EntropyPolicyActor(ReportsPeakMemory, _UpstreamPolicyActor):  # type: ignore[misc]
    """Upstream's policy actor, whose forward also returns entropies if the run captures them."""

    loss_features: Sequence[LossFeature] = ()
    checkpoint_states: dict[str, Any]

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: list[Any] | None = None
    ) -> None:
        """Like upstream's, with this package's model and trainer."""
        ppo_actor.ActorPPOTrainer = DeepspeedActorTrainer
        upstream_model.get_peft_model = adapters.adapt
        if captures_entropy(strategy.arguments) or platform.chosen_platform() == "cpu":
            ppo_actor.Actor = PolicyModel
        super().init_model_from_pretrained(strategy, pretrain, max_steps=max_steps, vllm_engines=vllm_engines)
        self.trainer.loss_features = self.loss_features
        # Averages that the checkpoint lacks start at its weights; in upstream (0.11.2) at the untrained ones.
        weights = [getattr(weight, "ds_tensor", weight).data for weight in self.actor.parameters()]
        for part, begin in zip(self._averages(), self.checkpoint_states.pop(_AVERAGES, None) or weights):
            part.copy_(begin)
        if not self.strategy.is_rank_0():  # whom alone the controller asks for the rest
            self.checkpoint_states = {}

    def _averages(self) -> list[torch.Tensor]:
        """The tensors of :func:`averages`; none without ``--train.enable_ema``."""
        return [part for parts in averages(self.ema_model) for part in parts] if self.ema_model else []

    def save_checkpoint(self, tag: str, client_states: dict[str, Any] | None = None, **metric: Any) -> None:
        """Like upstream's, with the moving average of the weights, which upstream (0.11.2) restarts on a resume."""
        saved = [part.cpu() for part in self._averages()]
        super().save_checkpoint(tag, (client_states or {}) | {_AVERAGES: saved}, **metric)

    def forward(
        self,
        sequences: torch.Tensor,
        action_mask: torch.Tensor,
        attention_mask: torch.Tensor,
        packed_seq_lens: list[int] | None = None,
        mm_train_inputs_list: list[Any] | None = None,
    ) -> TokenValues | torch.Tensor:
        """Map (b, t) tokens of one micro-batch to :class:`TokenValues` on the CPU, or only to upstream's log-probs.

        For a vision-language model, ``mm_train_inputs_list`` has the images for upstream's ``merge_mm_train_inputs``.
        """
        with self.peaks.phase(names.OLD_LOG_PROBS):
            if not captures_entropy(self.strategy.arguments):
                return super().forward(sequences, action_mask, attention_mask, packed_seq_lens, mm_train_inputs_list)
            device = torch.cuda.current_device()
            images = {}
            if mm_train_inputs_list and getattr(self.actor, "is_vlm", False):
                images = merge_mm_train_inputs(mm_train_inputs_list, device)
            self.actor.eval()
            with torch.no_grad():
                log_probs, output = self.actor(
                    sequences.to(device),
                    action_mask.to(device),
                    attention_mask.to(device),
                    return_output=True,
                    ring_attn_group=self.strategy.ring_attn_group,
                    return_entropy=True,
                    **images,
                )
            self.actor.train()
            entropy = output.entropy[:, -action_mask.shape[1] :]
            return TokenValues(log_probs.to("cpu"), (entropy * action_mask.to(device)).to("cpu"))

    def forward_reference(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the base's log-probs: upstream's ``forward`` with the adapters off."""
        with self.actor.model.module.disable_adapter():
            return super().forward(*args, **kwargs)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        with self.peaks.phase(names.PPO_TRAIN):
            return super().fit(kl_ctl)

    def broadcast_to_vllm(self, version: int = 0) -> None:
        with self.peaks.phase(names.BROADCAST):
            self.trainer.broadcast_to_vllm(version)

    def save_model(self) -> None:
        """Like upstream's, but retried if the model cannot be written."""
        args = self.strategy.arguments
        model = self.ema_model if args.train.enable_ema else self.actor
        keep_trying(partial(self.strategy.save_model, model, self.tokenizer), args.ckpt.output_dir)


class DeepspeedCriticTrainer(WholeSteps, CriticPPOTrainer):
    """Upstream's critic trainer, which trains a whole optimizer step at a time."""

    def ppo_train(self) -> dict[str, float]:
        """Train on the whole replay buffer; returns upstream's metrics."""
        return self.train(self.train_micro_batch)

    def train_micro_batch(self, batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Run forward and backward pass of a micro-batch, and after a step's last one the optimizer step."""
        rows = batch.experience
        self.critic.train()
        values, output = self.critic(
            rows.sequences,
            action_mask=rows.action_mask,
            attention_mask=rows.attention_mask,
            return_output=True,
            ring_attn_group=self.strategy.ring_attn_group,
            packed_seq_lens=None,
        )
        critic_loss = self.critic_loss_fn(
            values, rows.values, rows.returns, action_mask=rows.action_mask, **batch.totals._asdict()
        )
        loss = critic_loss
        if self.aux_loss:
            loss = loss + output.aux_loss * self.args.actor.aux_loss_coef * batch.row_share
        self.strategy.backward(poisoned(loss), self.critic, self.critic_optim)
        if batch.last:
            self.strategy.optimizer_step(self.critic_optim, self.critic, self.critic_scheduler, name="critic")
        return {"critic_loss": critic_loss.detach(), "values": masked_mean(values.detach(), rows.action_mask)}


class DeepspeedCriticActor(_UpstreamCriticActor):  # type: ignore[misc]
    """Upstream's critic actor with this package's trainer."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Like upstream's."""
        ppo_critic.CriticPPOTrainer = DeepspeedCriticTrainer
        super().init_model_from_pretrained(*args, **kwargs)

    def save_model(self) -> None:
        """Like upstream's, but retried if the model cannot be written."""
        if self.tokenizer is not None:  # upstream has none without --critic.save_value_network
            save = partial(self.strategy.save_model, self.critic, self.tokenizer)
            keep_trying(save, self.strategy.arguments.ckpt.output_dir + "_critic")


CriticActor = ray.remote(num_gpus=1)(DeepspeedCriticActor)
