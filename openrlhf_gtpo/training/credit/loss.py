"""The loss of a training micro-batch, on both backends: a function from named inputs to named outputs.

:func:`micro_batch_loss` is all of it. Its policy loss is that of an estimator or surrogate from ``algorithms`` with
OpenRLHF's train-rollout correction, or OpenRLHF's own for its estimators. Every term is a sum over the micro-batch,
divided by the counts of the whole optimizer step: the parts of micro-batches and replicas add up to the step's loss.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from openrlhf.models import aggregate_loss
from openrlhf.models.loss import PolicyLoss
from openrlhf.models.utils import compute_approx_kl, masked_mean
from torch import Tensor

from openrlhf_gtpo.algorithms import SURROGATES, Surrogate, policy_surrogate
from openrlhf_gtpo.algorithms.config import Mean
from openrlhf_gtpo.algorithms.losses import MAX_LOG_RATIO, Level, clipped_objective
from openrlhf_gtpo.algorithms.surrogates import ClipConfig
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import entropy_credit

# What upstream's default of --algo.advantage.is_correction_threshold bounds a ratio by.
_UNGATED_CAP = 5.0

# OpenRLHF's names for the settings of surrogates that it has flags for.
_UPSTREAM_SETTINGS = {"clip_low": "clip_eps_low", "clip_high": "clip_eps_high", "dual_clip": "dual_clip"}


class StepTotals(NamedTuple):
    """Divisors and the factor of a micro-batch's sums, under OpenRLHF's names."""

    batch_num_tokens: Tensor  # (), action tokens of the whole optimizer step, over all replicas
    global_batch_size: Tensor  # (), its rows with any
    dp_size: int = 1  # number of replicas, if their gradients are averaged rather than summed


@dataclass(frozen=True)
class LossInputs:
    """The inputs of a micro-batch's loss; B rows, T action columns."""

    log_probs: Tensor  # (B, T), of the policy in training; differentiable
    old_log_probs: Tensor | None  # (B, T), of the policy that the ratio is to; None: ``log_probs``, detached
    advantages: Tensor  # (B, T)
    mask: Tensor  # (B, T) bool, action tokens
    totals: StepTotals
    rollout_log_probs: Tensor | None = None  # (B, T), as the engine reported them
    base_log_probs: Tensor | None = None  # (B, T), of the reference policy
    entropy: Tensor | None = None  # (B, T) nats, of the policy in training; differentiable, junk outside the mask
    router_loss: Tensor | None = None  # (), this micro-batch's part of the auxiliary loss of a mixture of experts
    off_policy: Tensor | None = None  # (B,) bool, rows whose ratio is to the engine that sampled them
    correct: Tensor | None = None  # (B,) 1 where the response succeeded
    accuracy: Tensor | None = None  # (B,) fraction of its group that succeeded
    labels: Sequence[Any] = ()  # B labels from the replay buffer
    metrics: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # of features; they override the loss's


@dataclass(frozen=True)
class LossOutputs:
    """The loss of a micro-batch, with its metrics."""

    loss: Tensor  # (), this micro-batch's part of the optimizer step's loss
    metrics: Mapping[str, Tensor]  # by OpenRLHF's names: means over tokens, parts of the step's loss, or (B,)
    ratio: Tensor  # (B, T) float32 importance ratio of each token before clipping, detached; 1 outside the mask
    clipped: Tensor  # (B, T) bool, where the clip is active; at sequence level for whole rows


class LossFeature:
    """A feature's part in a rank that trains, called at each micro-batch's loss."""

    def begin(self, model: Any) -> None:
        """Called once the rank has loaded ``model``, a ``megatron.model.policy.LoadedModel``; not on DeepSpeed."""

    def loss_inputs(self, inputs: LossInputs) -> LossInputs:
        """Return inputs for the loss; they include old log-probs."""
        return inputs

    def loss_outputs(self, inputs: LossInputs, outputs: LossOutputs) -> None:
        """Called with the loss's inputs and outputs."""


def micro_batch_loss(
    inputs: LossInputs,
    policy_loss: "CreditLoss | UpstreamLoss",
    features: Sequence[LossFeature],
    args: Arguments,
    kl_coef: float,
) -> LossOutputs:
    """Compute policy loss + KL loss + router's loss - entropy bonus.

    Args:
        policy_loss: see :func:`make_policy_loss`.
        args: the run's arguments.
        kl_coef: weight of the KL loss in this step.

    Raises:
        TrainingStopped: an old log-prob or advantage is not finite; raised before the backward pass.
    """
    log_probs, mask, totals = inputs.log_probs, inputs.mask, inputs.totals

    # Without old log-probs from a forward (see ``old_policy``), take those in training. If one of these is not finite,
    # the optimizer step is skipped, and the rollout is not at fault.
    old_log_probs = inputs.old_log_probs
    if old_log_probs is None:
        old_log_probs = log_probs.detach().nan_to_num(0.0, 0.0, 0.0)
    compared = replace(inputs, old_log_probs=old_log_probs)
    for feature in features:
        compared = feature.loss_inputs(compared)

    # The policy loss.
    outputs = policy_loss(compared)
    loss, metrics = outputs.loss, {**outputs.metrics, **compared.metrics}

    # The KL loss. Its gradient may be weighted by the ratio to the old policy, in a guide's rows too; without old
    # log-probs, upstream takes a ratio of 1 (openrlhf 0.11.2, compute_approx_kl).
    if args.algo.kl.use_loss:
        kl_loss, difference = log_probs.new_zeros(()), log_probs.new_zeros(())
        if args.algo.kl.init_coef > 0:
            assert inputs.base_log_probs is not None
            kl = compute_approx_kl(
                log_probs,
                inputs.base_log_probs,
                log_probs_old=inputs.old_log_probs,
                kl_estimator=args.algo.kl.estimator,
                unbiased_gradient=args.algo.kl.unbiased_gradient,
            )
            kl_loss = aggregate_loss(kl, mask, **totals._asdict())
            difference = masked_mean(log_probs.float() - inputs.base_log_probs.float(), mask)
        loss = loss + kl_loss * kl_coef
        metrics |= {"kl": kl_loss, "logprobs_diff": difference}

    # The router's loss, and the entropy bonus: with a coefficient of 0 only a metric, without a second gradient
    # through the LM head.
    if inputs.router_loss is not None:
        loss = loss + inputs.router_loss
    if args.actor.entropy_coef is not None:
        assert inputs.entropy is not None
        bonus = aggregate_loss(inputs.entropy, mask, **totals._asdict())
        if args.actor.entropy_coef:
            loss = loss - bonus * args.actor.entropy_coef
        metrics["entropy_loss"] = bonus

    metrics = {name: value.detach() for name, value in metrics.items()}
    outputs = replace(outputs, loss=poisoned(loss), metrics=metrics)
    for feature in features:
        feature.loss_outputs(compared, outputs)
    return outputs


def poisoned(loss: Tensor) -> Tensor:
    """Return ``loss``, with a NaN gradient if it is not finite, which a clamp may hide: the step is then skipped."""
    return loss * torch.where(loss.isfinite(), 1.0, torch.nan).to(loss.dtype)


def make_policy_loss(args: Arguments) -> "CreditLoss | UpstreamLoss":
    """Make the policy loss of this run's estimator and surrogate.

    Raises:
        UsageError: the surrogate refuses its settings; the message names the flags.
        AssertionError, ValueError: PPO's clip, its dual clip or the train-rollout correction refuses its settings.
    """
    credit, name = entropy_credit(args), args.actor.policy_loss_type
    options = {option: v for option, v in vars(args.algo.advantage).items() if option.startswith("is_correction_")}
    options["clip_eps_low"], options["clip_eps_high"] = args.actor.eps_clip_low_high
    options["dual_clip"] = args.actor.dual_clip
    level: Level = "token" if args.actor.loss_agg_mode == "token-mean" else "sequence"
    if name in SURROGATES:
        kind = SURROGATES[name]
        fields = [field.name for field in dataclasses.fields(kind.config)]
        settings = {f: options[_UPSTREAM_SETTINGS[f]] for f in fields if f in _UPSTREAM_SETTINGS}
        settings |= {f: getattr(getattr(args.actor, name), f) for f in fields if f not in settings}
        try:
            config = kind.config(**settings)
        except ValueError as error:
            raise UsageError(f"--actor.policy_loss_type {name}, --actor.{name}.*: {error}") from error
        return CreditLoss(level, surrogate=partial(kind.loss, config=config), reads=kind.reads, **options)
    if credit is None:
        return UpstreamLoss(token_level_loss=level == "token", policy_loss_type=name, **options)
    ClipConfig(options["clip_eps_low"], options["clip_eps_high"])  # refused now, not after a rollout
    return CreditLoss(credit.estimator.level, getattr(credit.config, "ratio_mean", "arithmetic"), **options)


class CreditLoss:
    """The loss at ``level`` (Eq. 4, 16 for tokens; Eq. 6, 7, 18 for sequences), or the mean of another surrogate.

    Args:
        level: ``token`` or ``sequence``; for another surrogate, whether its mean is over all tokens, or over the
            means of the responses.
        ratio_mean: the mean of its tokens' ratios that makes a response's ratio, at sequence level.
        surrogate: a function of log_probs, old_log_probs, advantages and mask, (B, T) each; None for PPO's clip.
        reads: names of its further inputs, given by keyword (see ``SurrogateType``).
        options: OpenRLHF's ``clip_eps_low``, ``clip_eps_high``, ``dual_clip`` and ``is_correction_*``; it checks them.
    """

    def __init__(
        self,
        level: Level,
        ratio_mean: Mean = "arithmetic",
        surrogate: Callable[..., Surrogate] | None = None,
        reads: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.options = PolicyLoss(token_level_loss=level == "token", **options)
        self.level, self.ratio_mean, self.surrogate, self.reads = level, ratio_mean, surrogate, reads

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute this micro-batch's part of an optimizer step's loss; NaN if a log-prob is not finite.

        Returns:
            outputs with these metrics. ``ppo_clip_ratio`` and, with a correction, ``is_filter_ratio``: means over
            tokens, or (B,) where clip or correction apply to whole rows. ``ppo_kl``: mean over tokens of
            old_log_probs - log_probs. ``vllm_kl``: mean over tokens of rollout_log_probs - old_log_probs.

        Raises:
            TrainingStopped: an old log-prob or advantage is not finite; raised before the backward pass.
        """
        log_probs, old_log_probs, mask = inputs.log_probs, inputs.old_log_probs, inputs.mask
        assert old_log_probs is not None
        options, totals = self.options, inputs.totals

        # One term for each token, or row.
        finite = log_probs.isfinite() | ~mask
        unreduced = self.surrogate or partial(
            policy_surrogate,
            level=self.level,
            clip_low=options.clip_eps_low,
            clip_high=options.clip_eps_high,
            ratio_mean=self.ratio_mean,
            dual_clip=options.dual_clip,
        )
        context = {name: getattr(inputs, name) for name in self.reads}
        if "entropy" in context:  # NaN where a log-prob is NaN
            context["entropy"] = context["entropy"].detach().nan_to_num(0.0)
        try:
            surrogate = unreduced(
                log_probs.where(finite, old_log_probs), old_log_probs, inputs.advantages, mask, **context
            )
        except ValueError as error:
            raise TrainingStopped(f"The policy loss of a micro-batch: {error} It changed no weight.") from error
        loss = surrogate.loss.where(finite.all(), math.nan)
        clipped = surrogate.clipped.float()
        metrics = {"ppo_clip_ratio": clipped if clipped.dim() == 1 else _token_mean(clipped, mask)}
        metrics["ppo_kl"] = _token_mean(surrogate.approx_kl, mask)

        # The train-rollout correction weighs each term.
        if options.is_correction_level != "off":
            assert inputs.rollout_log_probs is not None, "the rollout returned no log-probs to correct with"
            weight, filtered = rollout_correction(options, old_log_probs, inputs.rollout_log_probs, mask)
            loss = loss * (weight if loss.dim() == 2 else self._response_weights(weight, mask))
            difference = _token_mean(inputs.rollout_log_probs - old_log_probs, mask)
            metrics |= {"vllm_kl": difference, "is_filter_ratio": filtered}

        # Their mean over the tokens, or the rows, of the whole optimizer step.
        if self.level == "sequence" and loss.dim() == 2:
            loss = _token_mean(loss, mask, dim=-1)
        units = totals.batch_num_tokens if self.level == "token" else totals.global_batch_size
        loss = loss.sum() / units * totals.dp_size
        ratio = _token_ratios(log_probs, old_log_probs, mask)
        return LossOutputs(loss, {"policy_loss": loss, **metrics}, ratio, _token_flags(surrogate.clipped, mask))

    def _response_weights(self, weight: Tensor, mask: Tensor) -> Tensor:
        """Average the tokens' corrections into one per response, (B,), by the same mean as its ratio. The geometric
        mean, which GMPO (the only other surrogate per response) uses too, covers the tokens that are kept."""
        if self.ratio_mean == "arithmetic" and self.surrogate is None:
            return _token_mean(weight, mask, dim=-1)
        kept = mask & (weight > 0)
        return _token_mean(weight.log(), kept, dim=-1).exp() * kept.any(-1)


class UpstreamLoss:
    """OpenRLHF's own ``PolicyLoss`` with the same ``options``, for its own estimators."""

    def __init__(self, **options: Any) -> None:
        self.options = PolicyLoss(**options)

    def __call__(self, inputs: LossInputs) -> LossOutputs:
        """Compute the loss; outputs as for :class:`CreditLoss`."""
        log_probs, old_log_probs, mask, options = inputs.log_probs, inputs.old_log_probs, inputs.mask, self.options
        assert old_log_probs is not None
        loss, clip_ratio, ppo_kl, vllm_kl, filtered = options(
            log_probs,
            old_log_probs,
            inputs.advantages,
            action_mask=mask,
            rollout_log_probs=inputs.rollout_log_probs,
            **inputs.totals._asdict(),
        )
        metrics = {"policy_loss": loss, "ppo_clip_ratio": clip_ratio, "ppo_kl": ppo_kl}
        if vllm_kl is not None:
            metrics |= {"vllm_kl": vllm_kl, "is_filter_ratio": filtered}

        # It returns how much was clipped, but not where: find that again.
        ratio = decides = _token_ratios(log_probs, old_log_probs, mask)
        if options.policy_loss_type == "gspo":
            behavior = old_log_probs
            if options.is_correction_level != "off":
                assert inputs.rollout_log_probs is not None
                behavior = inputs.rollout_log_probs
            log_ratio = (log_probs.detach().float() - behavior.float()).where(mask, 0)
            decides = (log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)).exp()
        _, clipped = clipped_objective(
            decides, inputs.advantages.float(), options.clip_eps_low, options.clip_eps_high, None
        )
        return LossOutputs(loss, metrics, ratio, _token_flags(clipped, mask))


def rollout_correction(
    options: PolicyLoss, old_log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute upstream's weights (B, T) of the trainer's policy against the engine's, and the fraction they filter: a
    token mean, or (B,) where whole responses are kept or dropped. Upstream computes them only inside its own forward
    (openrlhf 0.11.2, models/loss.py, PolicyLoss.forward); can go once it has a function for them.

    A gate on anything but a token's ratio would let a token of a long response have any weight; here the maximum is
    ``_UNGATED_CAP``."""
    low, high = options.is_correction_threshold
    log_ratio = (old_log_probs - rollout_log_probs).where(mask, 0)
    if options.is_correction_gating == "ratio":
        statistic = log_ratio
    else:  # a divergence of the sampled token's probability, which upstream keeps away from 0 and 1
        p, q = (values.exp().clamp(1e-6, 1 - 1e-6) for values in (rollout_log_probs, old_log_probs))
        both = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        # Rounding may make it negative where p and q are close, and upstream's own loss then drops the token
        # (https://github.com/OpenRLHF/OpenRLHF/pull/1354).
        statistic = both.clamp_min(0) if options.is_correction_gating == "binary_kl" else (p - q).abs()
    if options.is_correction_level == "seq":
        statistic = _token_mean(statistic, mask, dim=-1).unsqueeze(-1)
    if options.is_correction_gating == "ratio":
        statistic = statistic.exp()
    kept = (statistic >= low) & (statistic <= high)
    if options.is_correction_mode == "clip":
        weight = statistic.clamp(low, high)
    else:
        by_ratio = options.is_correction_level == "token" and options.is_correction_gating == "ratio"
        weight = log_ratio.exp().clamp_max(high if by_ratio else _UNGATED_CAP).where(kept, 0)
    dropped = (~kept).float()
    return weight, dropped.squeeze(-1) if options.is_correction_level == "seq" else _token_mean(dropped, mask)


def _token_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Average (B, T) values over all action tokens, or over each row's with ``dim`` -1; 0 without any."""
    return values.where(mask, 0).sum(dim=dim) / mask.sum(dim=dim).clamp_min(1)


def _token_ratios(log_probs: Tensor, old_log_probs: Tensor, mask: Tensor) -> Tensor:
    """(B, T) float32 ratios pi / pi_old, detached; 1 outside the mask."""
    log_ratio = (log_probs.detach().float() - old_log_probs.float()).where(mask, 0)
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _token_flags(clipped: Tensor, mask: Tensor) -> Tensor:
    """(B, T) bool from (B, T), (B, 1) or (B,)."""
    return (clipped if clipped.dim() == 2 else clipped.unsqueeze(-1)) & mask
