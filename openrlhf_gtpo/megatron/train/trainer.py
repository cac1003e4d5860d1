"""Megatron's gradient buffers, optimizer and learning-rate schedule around one model: a train step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides

from openrlhf_gtpo.megatron.fp8.weights import is_fp8
from openrlhf_gtpo.megatron.model.policy import LoadedModel
from openrlhf_gtpo.megatron.parallel import groups
from openrlhf_gtpo.megatron.parallel.host import device, megatron_calls, on_cuda
from openrlhf_gtpo.megatron.train import schedule
from openrlhf_gtpo.token_values import MicroBatch

# Maps a torch optimizer to its learning-rate schedule; nothing else of the optimizer matters.
MakeSchedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


@dataclass(frozen=True)
class OptimizerOptions:
    """AdamW's settings; biases and norms are not decayed.

    Fields:
        lr: peak learning rate.
        betas, eps, weight_decay: as AdamW's.
        max_norm: gradients are scaled to at most this L2 norm; 0 leaves them.
        distributed: shard optimizer states and gradients over the data-parallel ranks.
        ddp: DistributedDataParallelConfig fields that override all others.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    distributed: bool = True
    ddp: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """The report of one optimizer step.

    Fields:
        grad_norm: L2 norm of the whole gradient, before scaling; not finite if the step was skipped.
        next_lr: the learning rate of the next step.
        kept: what the loss callable gave back, one entry per micro-batch; empty on all but the last stage.
    """

    grad_norm: float
    next_lr: float
    kept: list[Any]


class Trainer:
    """Trains ``model`` in place.

    Args:
        make_schedule: None keeps the learning rate.
    """

    def __init__(self, model: LoadedModel, options: OptimizerOptions, make_schedule: MakeSchedule | None = None):
        self.model = model
        self.options = options
        config = model.config
        fp8 = model.options.fp8
        with megatron_calls():
            self.ddp = DistributedDataParallel(
                config=config,
                ddp_config=DistributedDataParallelConfig(
                    **{
                        "grad_reduce_in_fp32": True,
                        "use_distributed_optimizer": options.distributed,
                        # Over gloo, communicating threads would take the processor from those that compute.
                        "overlap_grad_reduce": on_cuda(),
                        "overlap_param_gather": on_cuda() and options.distributed,
                        "fp8_param_gather": model.options.fp8_primary_weights,
                        **options.ddp,
                    }
                ),
                module=model.stage,
            )
            # Autograd's nodes keep its backward hooks and so it and the groups alive, unseen by Python's collector.
            groups.at_destroy(vars(self.ddp).clear)
            optimizer_config = OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.betas[0],
                adam_beta2=options.betas[1],
                adam_eps=options.eps,
                clip_grad=options.max_norm,
                bf16=model.options.dtype is torch.bfloat16,
                params_dtype=model.options.dtype,
                fp8_recipe=None if fp8 is None else fp8.recipe,
                use_distributed_optimizer=options.distributed,
            )
            self.optimizer = get_megatron_optimizer(
                optimizer_config, [self.ddp], get_standard_config_overrides(optimizer_config)
            )
        for parameter in model.stage.parameters():
            # Megatron forgets the exact values only of parameters with a part in this rank's optimizer
            # (0.16.1, 0.19.2: optimizer/distrib_optimizer.py, _build_model_and_main_param_groups).
            if hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()
        for module in model.stage.modules():
            # Transformer Engine's layers add to main_grad in float32. Not set by gradient_accumulation_fusion, with
            # which Megatron's output layer needs Apex (0.16.1, 0.19.2); the LM head adds by itself.
            if hasattr(module, "fuse_wgrad_accumulation"):
                module.fuse_wgrad_accumulation = True
        config.finalize_model_grads_func = _finalize
        config.no_sync_func = self.ddp.no_sync
        # The schedule works on an optimizer of its own, whose learning rate is passed on before each step.
        self._schedule_carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=options.lr)
        self.lr_schedule = make_schedule(self._schedule_carrier) if make_schedule else None
        self.steps = 0  # optimizer steps so far, including those before a resume
        self.gather_parameters()

    def step(
        self,
        micro_batches: Sequence[MicroBatch],
        loss: schedule.Loss,
        *,
        with_entropy: bool = False,
        another_follows: bool = False,
    ) -> StepReport:
        """Take one optimizer step over all ``micro_batches`` of this replica.

        Args:
            loss: see :data:`openrlhf_gtpo.megatron.train.schedule.Loss`.
            with_entropy: hand the loss differentiable entropies too.
            another_follows: the next thing done with the model is another step, whose forward pass then gathers the
                new weights as it goes. Until then, only this replica's shard of the weights is new.
        """
        lr = self._schedule_carrier.param_groups[0]["lr"]
        for group in self.optimizer.param_groups:
            group["lr"], group["betas"], group["eps"] = lr, self.options.betas, self.options.eps  # not a checkpoint's
            if not on_cuda():
                group["fused"] = True  # torch's Adam in one pass, which Megatron has no option for
            # Megatron leaves it to its scheduler to multiply by 0 for biases and norms (0.16.1, 0.19.2:
            # optimizer_param_scheduler.py, OptimizerParamScheduler.step).
            group["weight_decay"] = self.options.weight_decay * group.get("wd_mult", 1.0)
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        kept = schedule.forward_backward(self.model, self.ddp, micro_batches, loss, with_entropy=with_entropy)
        with megatron_calls():
            if self.model.fp8 is not None:
                self.model.fp8.update_scales(after_step=True)
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            finite = math.isfinite(norm)  # on all ranks, or on none
            if finite:
                updated, _, _ = self.optimizer.step()
                assert updated, "without a loss scale Megatron skips no step"
        if not another_follows:
            self.gather_parameters()
        self.steps += finite
        if finite and self.lr_schedule is not None:
            self._schedule_carrier.step()
            self.lr_schedule.step()
        return StepReport(norm, self._schedule_carrier.param_groups[0]["lr"], kept)

    def gather_parameters(self) -> None:
        """Gather over the replicas all parameters that no forward pass has gathered since the optimizer's step;
        collective if there are any.

        Megatron's forward hooks do the same one bucket after another, and nothing once it is done. Replicas make
        different numbers of passes outside a step; those then never wait for each other.
        """
        if self.ddp.use_forward_hook:
            with megatron_calls():
                for bucket in (*self.ddp.bucket_groups, *self.ddp.expert_parallel_bucket_groups):
                    bucket.finish_param_sync(skip_next_bucket_dispatch=True)

    @torch.no_grad()
    def exact_weight(self, parameter: torch.Tensor) -> torch.Tensor:
        """One of this rank's parameters in high precision, without gradient. An FP8 primary weight is assembled from
        the replicas' float32 shards, and the call is collective over them."""
        if not is_fp8(parameter):
            return parameter.detach()
        full = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device())
        for part in self.optimizer.chained_optimizers:
            for weight, shard, start in zip(*part._get_fp8_params_and_shard_fp32_from_fp8(), strict=True):
                if weight is parameter:
                    if shard is not None:
                        full.view(-1)[start : start + shard.numel()].copy_(shard)
                    torch.distributed.all_reduce(full, group=part.data_parallel_group)
                    return full
        raise AssertionError("an FP8 weight that no optimizer trains")

    def schedule_state(self) -> dict[str, Any]:
        """The state of the learning-rate schedule and of FP8's scales, for :meth:`load_schedule_state`."""
        fp8 = self.model.fp8
        return {
            "fp8_calibrated": fp8.options.recipe if fp8 is not None and fp8.calibrated else None,
            "steps": self.steps,
            "lr_schedule": None if self.lr_schedule is None else self.lr_schedule.state_dict(),
            "lr_carrier": self._schedule_carrier.state_dict(),
        }

    def load_schedule_state(self, state: dict[str, Any]) -> None:
        """Go on from what :meth:`schedule_state` returned, with this run's peak learning rate."""
        self.steps = state["steps"]
        if self.model.fp8 is not None and state.get("fp8_calibrated") == self.model.fp8.options.recipe:
            self.model.fp8.calibrated = True
        self._schedule_carrier.load_state_dict(state["lr_carrier"])
        if self.lr_schedule is not None:
            self.lr_schedule.load_state_dict(state["lr_schedule"])
            self.lr_schedule.base_lrs = [self.options.lr]
        [group] = self._schedule_carrier.param_groups
        peak = group.get("initial_lr", group["lr"])  # of the run that was saved
        if peak not in (0.0, self.options.lr):
            group["lr"] *= self.options.lr / peak
        group["initial_lr"] = self.options.lr


def _finalize(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's reduction of gradients without its division by the number of tokens; the loss has its own."""
    finalize_model_grads(model, None, **options)
