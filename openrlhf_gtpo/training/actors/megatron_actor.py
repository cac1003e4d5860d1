"""Ray actors with the policy and the reference model on Megatron-core; they have upstream's methods."""

import math
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import BaseModelActor
from openrlhf.utils.distributed_util import torch_dist_barrier_and_cuda_sync
from transformers import get_scheduler

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.megatron.checkpoint.checkpoints import Checkpoints
from openrlhf_gtpo.megatron.checkpoint.export import save_hf
from openrlhf_gtpo.megatron.model.policy import LoadedModel, ModelOptions, load_model
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.megatron.train.offload import Offload
from openrlhf_gtpo.megatron.train.trainer import MakeSchedule, OptimizerOptions, Trainer
from openrlhf_gtpo.platform.agreement import from_first_rank
from openrlhf_gtpo.platform.memory import ReportsPeakMemory
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.actors.actor_trainer import keep_trying
from openrlhf_gtpo.training.actors.dispatch import FORWARDS
from openrlhf_gtpo.training.actors.megatron_trainer import MegatronActorTrainer
from openrlhf_gtpo.training.actors.micro_batches import PaddedBatch, forward_padded
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.credit.loss import LossFeature
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of, layout_of, refusals_name_flags
from openrlhf_gtpo.training.settings.megatron_overrides import parse_overrides
from openrlhf_gtpo.training.settings.prompts import keep_prompts

# transformers' schedules that support a floor, which upstream gives as a fraction of the peak.
_FLOORED = {"cosine_with_min_lr", "cosine_warmup_with_min_lr"}


class MegatronModelActor(BaseModelActor):
    """One rank of a model on Megatron: its process groups, its part of the weights, and its forward pass."""

    model: LoadedModel
    trains = False

    def _load(self, strategy: Any, source: str) -> None:
        args = strategy.arguments
        self._setup_distributed(strategy)
        groups.initialize(layout_of(args), args.train.seed)
        with refusals_name_flags():  # what this GPU cannot do in FP8
            options = _model_options(args)
            self.model = load_model(
                source, options if self.trains else replace(options, lora=None), for_training=self.trains
            )

    def execute_batch(self, method_name: str, all_data: dict[str, list], start_idx: int, end_idx: int) -> list[Any]:
        """Like upstream's, but a forward fills its micro-batches from all dispatched entries, not one at a time. It
        maps each entry's (b, t) tokens to (b, a) values on the CPU, on every rank of the replica."""
        if method_name not in FORWARDS:
            return super().execute_batch(method_name, all_data, start_idx, end_idx)
        names_of_columns = ["sequences", "attention_mask", "action_mask"]
        # The reference does not read routes.
        if self.trains and method_name == "forward" and "mm_train_inputs_list" in all_data:
            names_of_columns.append("mm_train_inputs_list")
        columns = [all_data[name][start_idx:end_idx] for name in names_of_columns]
        batches = list(zip(*columns, strict=True))
        return self._forward_all(batches) if method_name == "forward" else self._forward_reference(batches)

    def _forward_all(self, batches: list[PaddedBatch]) -> list[Any]:
        args = self.strategy.arguments
        per_gpu = args.rollout.max_tokens_per_gpu or args.train.max_tokens_per_gpu
        budget = per_gpu * args.megatron.context_parallel_size
        return forward_padded(batches, budget, partial(schedule.forward, self.model), args.train.shares_prompts)

    def _forward_reference(self, batches: list[PaddedBatch]) -> list[Any]:
        with self.model.without_adapters():
            return [result.log_probs for result in MegatronModelActor._forward_all(self, batches)]


class MegatronPolicy(ReportsPeakMemory, MegatronModelActor):
    """The policy on Megatron. Drop-in replacement for upstream's ``PolicyModelActor``."""

    trains = True
    high_precision = False
    loss_features: Sequence[LossFeature] = ()

    def init_model_from_pretrained(
        self, strategy: Any, pretrain: str, max_steps: int | None = None, vllm_engines: list[Any] | None = None
    ) -> None:
        """Load ``pretrain``, or a checkpoint if ``--ckpt.load_enable`` finds one, and join the engines."""
        args = strategy.arguments
        self._load(strategy, pretrain)
        self.megatron = Trainer(self.model, _optimizer_options(args), _schedule(args, max_steps or 1))
        self.offload = Offload(self.megatron)
        if args.megatron.offload:
            self.offload.gradients()  # room for the checkpoint, and for the reference that loads meanwhile
        self.checkpoints = Checkpoints(
            os.path.join(args.ckpt.path, "_actor"),
            asynchronous=args.megatron.async_save,
            max_num=args.ckpt.max_num,
            max_mem_gb=args.ckpt.max_mem,
            hf_source=pretrain,
            add_side_files=partial(keep_prompts, args=args),
        )
        self.source = pretrain
        self.checkpoint_states: dict[str, Any] = {}
        if args.ckpt.load_enable:
            states = self.checkpoints.load(self.megatron, args.ckpt.load_tag)
            if strategy.is_rank_0():  # whom alone the controller asks for them
                self.checkpoint_states = states
        self.trainer = MegatronActorTrainer(strategy, self.model, self.megatron, vllm_engines)
        self.trainer.loss_features = self.loss_features
        for feature in self.loss_features:
            feature.begin(self.model)
        self._rest()

    def _forward_all(self, batches: list[PaddedBatch]) -> list[Any]:
        with self.peaks.phase(names.OLD_LOG_PROBS):
            self.offload.restore(optimizer=False)
            fp8 = self.model.fp8
            with fp8.high_precision() if fp8 and self.high_precision else nullcontext():
                results = super()._forward_all(batches)
            return results if captures_entropy(self.strategy.arguments) else [result.log_probs for result in results]

    def _forward_reference(self, batches: list[PaddedBatch]) -> list[Any]:
        self.offload.restore(optimizer=False)
        return super()._forward_reference(batches)

    def set_high_precision(self, on: bool) -> None:
        """Turn FP8 off (or on again) in the forward passes that follow."""
        self.high_precision = on

    def append(self, experience: Experience) -> None:
        """Add the rows of one micro-batch to this replica's replay buffer."""
        self.trainer.replay_buffer.append(experience)

    def fit(self, kl_ctl: float = 0) -> dict[str, float]:
        """Train on the replay buffer and empty it; every rank returns the same metrics."""
        with self.peaks.phase(names.PPO_TRAIN):
            self.offload.restore()
            status = self.trainer.ppo_train(kl_ctl)
            self.trainer.replay_buffer.clear()
        return status

    def broadcast_to_vllm(self, version: int = 0) -> None:
        """See ``ActorTrainer``."""
        with self.peaks.phase(names.BROADCAST):
            self.offload.restore(optimizer=False)
            self.trainer.broadcast_to_vllm(version)
        self._rest()  # the engines generate next

    def reload_states(self) -> None:
        """Bring back what :meth:`offload_states` moved."""
        self.offload.restore()

    def offload_states(self) -> None:
        """Move gradients and optimizer states to the host."""
        self.offload.optimizer()

    def get_checkpoint_states(self) -> dict[str, Any]:
        """Return the controller's state from the loaded checkpoint; empty without one."""
        return self.checkpoint_states

    def save_checkpoint(
        self, tag: str, client_states: dict | None = None, metric_value: Any = None, metric_key: Any = None
    ) -> None:
        """Save the training state under ``tag``, and a Hugging Face checkpoint if ``--ckpt.save_hf`` asks for it.

        Raises:
            CheckpointWriteError: it could not be written; training can continue.
        """
        args = self.strategy.arguments
        self.offload.restore(gradients=False)  # the engines' weights are awake at the same time
        try:
            if not args.ckpt.disable_ds:
                self.checkpoints.save(
                    tag, self.megatron, client_states or {}, metric_value=metric_value, metric_key=metric_key
                )
            if args.ckpt.save_hf:
                self._save_hf(os.path.join(args.ckpt.path, f"{tag}_hf"))
        finally:
            torch_dist_barrier_and_cuda_sync()
            self._rest()

    def finish_checkpoint(self, wait: bool = True) -> None:
        """Publish the last checkpoint, which an asynchronous save writes during training. Wait until it is complete;
        without ``wait``, publish it only if it already is.

        Raises:
            CheckpointWriteError: it could not be written; training can continue.
        """
        self.checkpoints.finish(wait)

    def save_model(self) -> None:
        """Write the trained policy as a Hugging Face checkpoint to ``--ckpt.output_dir``."""
        # The optimizer holds the exact values of FP8 weights.
        self.offload.restore(optimizer=self.model.options.fp8_primary_weights, gradients=False)
        try:
            self.checkpoints.finish()
        except CheckpointWriteError as error:
            self.strategy.print(f"Warning: {error} Writing the trained model now.")
        keep_trying(self._save_hf, self.strategy.arguments.ckpt.output_dir)

    def _save_hf(self, directory: str) -> None:
        save_hf(self.megatron, self.source, directory)
        from_first_rank(lambda: keep_prompts(Path(directory), self.strategy.arguments), CheckpointWriteError)
        torch_dist_barrier_and_cuda_sync()

    def _rest(self) -> None:
        if self.strategy.arguments.megatron.offload:
            self.offload.optimizer()
            self.offload.parameters()


class MegatronReference(MegatronModelActor):
    """The frozen reference model for the KL, on Megatron. Drop-in for upstream's ``ReferenceModelActor``."""

    def init_model_from_pretrained(self, strategy: Any, pretrain: str) -> None:
        """Load ``pretrain``."""
        self._load(strategy, pretrain)
        self.model.stage.requires_grad_(False)
        self.offload = Offload(self.model)
        self._rest()

    def _forward_all(self, batches: list[PaddedBatch]) -> list[Any]:
        self.offload.restore()
        results = super()._forward_all(batches)
        self._rest()
        return [result.log_probs for result in results]

    def _rest(self) -> None:
        if self.strategy.arguments.ref.offload:
            self.offload.parameters()


MegatronReferenceActor = ray.remote(num_gpus=1)(MegatronReference)


def _model_options(args: Arguments) -> ModelOptions:
    return ModelOptions(
        layout=layout_of(args),
        dtype=torch.bfloat16,
        temperature=args.rollout.temperature,
        recompute=args.megatron.recompute,
        overrides=parse_overrides(args.megatron.override),
        fp8=fp8_of(args),
        lm_head_bytes=args.megatron.lm_head_mb and args.megatron.lm_head_mb * 2**20,
        lora=args.actor.lora,
        shares_prompts=args.train.shares_prompts,
        seed=args.train.seed,
    )


def _optimizer_options(args: Arguments) -> OptimizerOptions:
    adam = args.actor.adam
    return OptimizerOptions(
        lr=adam.lr,
        betas=(adam.betas[0], adam.betas[1]),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
        max_norm=args.actor.max_norm,
        distributed=args.megatron.use_distributed_optimizer,
        ddp=parse_overrides(args.megatron.ddp, "ddp"),
    )


def _schedule(args: Arguments, steps: int) -> MakeSchedule:
    name = args.actor.lr_scheduler
    return partial(
        get_scheduler,
        name,
        num_warmup_steps=math.ceil(steps * args.actor.lr_warmup_ratio),
        num_training_steps=steps,
        scheduler_specific_kwargs={"min_lr_rate": args.actor.min_lr_ratio} if name in _FLOORED else {},
    )
