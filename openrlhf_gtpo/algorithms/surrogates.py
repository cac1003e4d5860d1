"""The surrogates by name: how a step is clipped, independent of how advantages are computed. To add one, write its
settings and its function, and list it in ``SURROGATES``.

PPO's clip is ``policy_surrogate`` in ``losses.py``. Here is each paper's own objective, also unreduced. The papers'
texts were not available, so each formula was checked against the implementation that its docstring names. Only HAPO's
have equation numbers, from notes on the paper. Log ratios are bounded by +-20 everywhere, which keeps far off-policy
tokens finite.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .config import Settings, check_number, setting
from .losses import MAX_LOG_RATIO, Level, Surrogate, check_terms, clipped_objective, sequence_advantage


@dataclass(frozen=True)
class ClipConfig(Settings):
    """A range of the importance ratio, [1 - clip_low, 1 + clip_high].

    Raises:
        ValueError: a setting out of range.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("clip_low", self.clip_low, at_least=0, at_most=1)
        check_number("clip_high", self.clip_high, at_least=0)


@dataclass(frozen=True)
class GSPOTokenConfig(ClipConfig):
    """GSPO-token (arXiv 2507.18071): its clip range, and dual clip as in :func:`policy_surrogate`."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None


def gspo_token_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: GSPOTokenConfig
) -> Surrogate:
    """-min(s_t A_t, clip(s_t) A_t) with s_t = sg[s] pi(o_t) / sg[pi(o_t)], s the geometric mean of a response's ratios
    (arXiv 2507.18071; verl 0.8.0.dev, ``compute_policy_loss_gspo``).

    Every s_t has the value of the response's s and the gradient of its own token, so advantages may differ within a
    row. Where they do not, loss and gradient are GSPO's.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    mean = log_ratio.detach().sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp_min(1)
    own_gradient = log_ratio - log_ratio.detach()  # 0, with the token's gradient
    ratio = (mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own_gradient).exp().where(mask, 1)
    objective, clipped = clipped_objective(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    return Surrogate(-objective, mask, clipped, ratio.detach(), -log_ratio.detach())


@dataclass(frozen=True)
class CISPOConfig(ClipConfig):
    """CISPO (arXiv 2506.13585). As in the paper, the only lower bound is 0. The upper bound, 5, is our choice; the
    paper tunes its own."""

    clip_low: float = 1.0
    clip_high: float = 4.0


def cispo_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: CISPOConfig
) -> Surrogate:
    """-sg[clip(w_t)] A_t log pi(o_t): REINFORCE with clipped weights, in which no token loses its gradient
    (arXiv 2506.13585; verl 0.8.0.dev, ``compute_policy_loss_cispo``)."""
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = -weight * advantages * log_probs.to(log_ratio.dtype).where(mask, 0)
    return Surrogate(loss, mask, weight != ratio, ratio, -log_ratio.detach())


@dataclass(frozen=True)
class SAPOConfig(Settings):
    """SAPO (arXiv 2511.20347)."""

    tau_positive: float = setting(1.0, "steepness of the gate away from a ratio of 1 where A > 0", above=0)
    tau_negative: float = setting(1.05, "steepness of the gate away from a ratio of 1 where A <= 0", above=0)


def sapo_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: SAPOConfig
) -> Surrogate:
    """-f(w_t) A_t with the gate f(x) = sigmoid(tau (x - 1)) 4 / tau, whose slope at 1 is 1, instead of a clip
    (arXiv 2511.20347; verl 0.8.0.dev, ``compute_policy_loss_sapo``). ``clipped`` is False everywhere."""
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    tau = torch.full_like(advantages, config.tau_negative).masked_fill(advantages > 0, config.tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return Surrogate(-gate * advantages, mask, torch.zeros_like(mask), ratio.detach(), -log_ratio.detach())


@dataclass(frozen=True)
class GMPOConfig(ClipConfig):
    """GMPO (arXiv 2507.20673). The paper's range (e^-0.4, e^0.4) bounds the ratio, like every clip range here; verl
    and TRL give it in log space."""

    clip_low: float = 1 - math.exp(-0.4)
    clip_high: float = math.exp(0.4) - 1


def gmpo_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: GMPOConfig
) -> Surrogate:
    """-A times the geometric mean of a response's ratios, each clipped on the side that A pushes it toward (arXiv
    2507.20673; verl 0.8.0.dev, ``compute_policy_loss_geo_mean``; TRL 1.7, docs/source/gmpo.md).

    A unit is a row. It counts as ``clipped`` if any of its tokens is. Also raises ValueError for advantages that
    differ within a row.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    low = math.log(1 - config.clip_low) if config.clip_low < 1 else -math.inf
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=math.log1p(config.clip_high)), log_ratio.clamp(min=low))
    mean = bounded.where(mask, 0).sum(-1) / mask.sum(-1).clamp_min(1)
    ratio = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = ((bounded != log_ratio) & (advantages != 0)).any(-1)
    loss = -ratio * sequence_advantage(advantages, mask)
    return Surrogate(loss, mask.any(-1), clipped, ratio.detach(), -log_ratio.detach())


@dataclass(frozen=True)
class ClipCovConfig(ClipConfig):
    """Clip-Cov (arXiv 2505.22617)."""

    dual_clip: float | None = None
    fraction: float = setting(
        2e-4, "fraction of a micro-batch's tokens that lose their gradient, at least one token", above=0, at_most=1
    )
    cov_low: float = setting(1.0, "lower bound of the covariance of tokens that may lose their gradient")
    cov_high: float = setting(5.0, "upper bound of the covariance of such tokens")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("cov_high", self.cov_high, above=self.cov_low)


def clip_cov_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: ClipCovConfig
) -> Surrogate:
    """PPO's clip, with no gradient for a few tokens drawn from those of high covariance (arXiv 2505.22617; verl
    0.8.0.dev, ``compute_policy_loss_clip_cov``).

    Departure: covariances are taken over the N tokens of a micro-batch, as in verl, where the paper uses a batch. The
    choice therefore depends on how a step is split. The loss of a drawn token is 0.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective, clipped = clipped_objective(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    covariance = token_covariance(log_probs, advantages, mask)
    candidates = (mask & ~clipped & (covariance > config.cov_low) & (covariance < config.cov_high)).nonzero()
    generator = torch.Generator().manual_seed(len(candidates))  # ranks that share a micro-batch have to agree
    order = torch.randperm(len(candidates), generator=generator)[: _num_marked(config.fraction, mask)]
    drawn = torch.zeros_like(mask)
    drawn[tuple(candidates[order.to(mask.device)].T)] = True
    loss = -objective.masked_fill(drawn, 0)
    return Surrogate(loss, mask, clipped | drawn, ratio.detach(), -log_ratio.detach())


@dataclass(frozen=True)
class KLCovConfig(Settings):
    """KL-Cov (arXiv 2505.22617)."""

    fraction: float = setting(
        2e-4, "fraction of a micro-batch's tokens that get the penalty, at least one token", above=0, at_most=1
    )
    coef: float = setting(1.0, "weight of the penalty", at_least=0)


def kl_cov_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: KLCovConfig
) -> Surrogate:
    """-w_t A_t, unclipped, plus coef |log w_t| for the tokens of the highest covariance (arXiv 2505.22617; verl
    0.8.0.dev, ``compute_policy_loss_kl_cov``). ``clipped`` marks those tokens.

    Departures: the N tokens come from a micro-batch, as in :func:`clip_cov_surrogate`. The KL divergence is estimated
    by |log w|, as in verl.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    covariance = token_covariance(log_probs, advantages, mask).masked_fill(~mask, -torch.inf)
    highest = covariance.flatten().topk(_num_marked(config.fraction, mask)).indices
    marked = torch.zeros_like(mask).flatten().scatter_(0, highest, True).view_as(mask)
    loss = -bounded.exp() * advantages + config.coef * bounded.abs() * marked
    return Surrogate(loss, mask, marked, bounded.detach().exp(), -log_ratio.detach())


@dataclass(frozen=True)
class STAREConfig(ClipConfig):
    """STARE (arXiv 2606.19236)."""

    dual_clip: float | None = None
    fraction: float = setting(
        0.1,
        "fraction of tokens to weight, separately where A > 0 and A < 0: the tokens of highest surprisal, at least "
        "one of each",
        above=0,
        at_most=1,
    )
    weight_positive: float = setting(
        1.1, "weight of the chosen tokens with A > 0; the authors recommend 1.05 from 14B up", at_least=1
    )
    weight_negative: float = setting(
        1.0, "weight of the chosen tokens with A < 0; 1 is the authors' variant O1, C2 uses 0.9", above=0, at_most=1
    )
    target_entropy: float = setting(0.3, "entropy, in nats, at or above which no token is weighted", at_least=0)


def stare_surrogate(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, config: STAREConfig
) -> Surrogate:
    """PPO's clip, with a weight for the tokens with the highest surprisal -log pi while entropy is low (arXiv
    2606.19236; the authors' github.com/hp-luo/STARE, ``compute_policy_loss_stare``).

    Departures: entropy is estimated by the mean surprisal of a micro-batch's tokens, where the authors take the
    batch's. Their adaptive weights, off by default, are left out. As in their code, tokens are ranked within a
    micro-batch.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective, clipped = clipped_objective(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    surprisal = -log_probs.detach().where(mask, 0)
    weight = torch.ones_like(advantages)
    if surprisal.sum() < config.target_entropy * mask.sum():
        for side, factor in ((advantages > 0, config.weight_positive), (advantages < 0, config.weight_negative)):
            ranked = surprisal.masked_fill(~side, -torch.inf).flatten()
            count = math.ceil(config.fraction * int(side.sum()) - 1e-9)  # the product is meant exactly
            weight.view(-1)[ranked.topk(count).indices] = factor
    return Surrogate(-weight * objective, mask, clipped, ratio.detach(), -log_ratio.detach())


@dataclass(frozen=True)
class HAPOConfig(ClipConfig):
    """HAPO's redistribution and clip range (arXiv 2509.16591)."""

    dual_clip: float | None = None
    pivot: float = setting(
        0.8,
        "quantile of a micro-batch's log-entropies that separates high entropy from low",
        at_least=0,
        at_most=1,
    )
    redistribution: float = setting(
        1.0,
        "maximum relative change of an advantage by its token's distance from the pivot",
        at_least=0,
        at_most=1,
    )
    adaptation: float = setting(
        1.0, "relative widening of a token's clip range at the greatest distance from the pivot", at_least=0
    )


def hapo_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: HAPOConfig,
    *,
    entropy: Tensor,
) -> Surrogate:
    """PPO's clip, with advantages and clip bounds that depend on entropy.

    A becomes A (1 + h) at tokens of high entropy whose ratio leaves the inner half of the clip range, and at tokens of
    low entropy whose ratio stays in it (Eq. 10, 11). h is the distance of log H from its pivot, scaled to [-1, 1] on
    each side (Eq. 5, 6). The upper bound widens to 1 + clip_high (1 + h) at high entropy, the lower one to 1 -
    clip_low (1 - h) at low entropy (Eq. 12, 13 of arXiv 2509.16591v2; the authors' github.com/starriver030515/HAPO,
    ``ada_clip``, ``ada_advantage``).

    Departures: the paper's adaptive temperature (Eq. 8) and its mean over a group's tokens (Eq. 9) are left out. In
    Eq. 6 and the authors' code, h is positive at low entropy too; here it is negative, which gives the lower advantage
    and the wider lower bound of their figure and text. The inner half is taken from the plain clip range, as in the
    figure; the code takes the widened one. As in their code, the pivot is a micro-batch's.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    height = _height(entropy.to(ratio.dtype), mask, config.pivot)
    low = config.clip_low * (1 - config.adaptation * height.clamp(max=0))
    high = config.clip_high * (1 + config.adaptation * height.clamp(min=0))
    inside = (ratio.detach() > 1 - config.clip_low / 2) & (ratio.detach() < 1 + config.clip_high / 2)
    advantages = advantages * (1 + config.redistribution * height).where((height > 0) != inside, 1)
    objective, clipped = clipped_objective(ratio, advantages, low, high, config.dual_clip)
    return Surrogate(-objective, mask, clipped, ratio.detach(), -log_ratio.detach())


def _height(entropy: Tensor, mask: Tensor, pivot: float) -> Tensor:
    """(B, T) log-entropies minus their ``pivot`` quantile, divided by the largest distance on each side; 0 outside the
    mask."""
    logs = entropy.clamp_min(1e-8).log()
    inside = logs[mask]
    if not inside.numel():
        return torch.zeros_like(logs)
    distance = (logs - inside.kthvalue(1 + round(pivot * (len(inside) - 1))).values).where(mask, 0)
    return distance / torch.where(distance > 0, distance.max(), -distance.min()).clamp_min(1e-8)


@dataclass(frozen=True)
class HTPOConfig(ClipConfig):
    """HTPO (arXiv 2605.08283)."""

    dual_clip: float | None = None
    difficulty_threshold: float = setting(
        0.6, "a prompt is hard if less than this fraction of its responses is right", at_least=0, at_most=1
    )
    forking_fraction: float = setting(
        0.2,
        "fraction of a response's tokens that count as forking tokens: the tokens of highest entropy",
        above=0,
        at_most=1,
    )
    lowest_fraction: float = setting(
        0.006,
        "in right responses to hard prompts, fraction of the other tokens whose loss is dropped, lowest entropy "
        "first; rounded down, minus one token",
        at_least=0,
        at_most=1,
    )
    highest_fraction: float = setting(
        0.02,
        "in right responses to easy prompts, fraction of the forking tokens whose loss is dropped, highest entropy "
        "first; at least one token",
        above=0,
        at_most=1,
    )


def htpo_surrogate(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: HTPOConfig,
    *,
    entropy: Tensor,
    correct: Tensor,
    accuracy: Tensor,
) -> Surrogate:
    """PPO's clip, but forking tokens keep a gradient of constant weight outside the clip range.

    In right responses to hard prompts the weight is 1 + clip_high above the range and 1 / w below it. In wrong
    responses it is 1 - clip_low below the range. In right responses, tokens of the lowest entropy lose their loss if
    the prompt is hard, and tokens of the highest entropy if it is easy (arXiv 2605.08283; figure and
    ``compute_policy_loss_htpo`` of the authors' github.com/xcyao00/HTPO). ``clipped`` marks tokens without a gradient.

    Departure: the authors' code adds the terms of constant weight to the loss, which pushes the policy against the
    advantage. Their figure shows them in the objective, as here.
    """
    log_ratio, advantages = check_terms(log_probs, old_log_probs, advantages, mask)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    objective, clipped = clipped_objective(ratio, advantages, config.clip_low, config.clip_high, config.dual_clip)
    w, right, hard = ratio.detach(), correct.bool()[:, None], (accuracy < config.difficulty_threshold)[:, None]
    count = mask.sum(-1, keepdim=True)
    falling = entropy.masked_fill(~mask, -torch.inf).sort(-1, descending=True).values
    forking = mask & (entropy >= _nth(falling, config.forking_fraction, count))
    rising = entropy.masked_fill(~mask | forking, torch.inf).sort(-1).values
    forks = forking.sum(-1, keepdim=True)
    lowest = mask & ~forking & (entropy < _nth(rising, config.lowest_fraction, count - forks))
    highest = forking & (entropy >= _nth(falling, config.highest_fraction, forks))
    left_out = right & torch.where(hard, lowest, highest)

    above, below = w > 1 + config.clip_high, w < 1 - config.clip_low
    weight = torch.where(above, 1 + config.clip_high, torch.where(right, 1 / w, 1 - config.clip_low))
    kept = forking & torch.where(right, hard & (above | below), below)
    objective = torch.where(kept, weight * advantages * (ratio / w), objective)
    loss = -objective.masked_fill(left_out, 0)
    return Surrogate(loss, mask, (clipped & ~kept) | left_out, w, -log_ratio.detach())


def _nth(ordered: Tensor, fraction: float, count: Tensor) -> Tensor:
    """(B, 1) value at the end of the first ``fraction`` of each row's ``count`` values, rounded down, at least the
    first."""
    number = (fraction * count.double() + 1e-9).long().clamp_min(1)  # the product is meant exactly
    return ordered.gather(-1, number - 1)


def token_covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Compute each action token's (B, T) contribution to the covariance of log-prob and advantage, detached: (log pi -
    its mean) (A - its mean), as arXiv 2505.22617 defines it. Values outside the mask are arbitrary."""
    return _centered(log_probs.detach().to(advantages.dtype), mask) * _centered(advantages, mask)


def _centered(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T) values minus their mean over the action tokens. Exactly 0 if all are equal, where a rounded mean would
    leave a residue."""
    mean = values.where(mask, 0).sum() / mask.sum().clamp_min(1)
    lowest, highest = values.where(mask, torch.inf).min(), values.where(mask, -torch.inf).max()
    return values - torch.where(lowest == highest, lowest, mean)


def _num_marked(fraction: float, mask: Tensor) -> int:
    """How many action tokens to mark: ``fraction`` of the micro-batch, rounded down, at least one if there are any."""
    count = int(mask.sum())
    return min(count, max(1, int(fraction * count)))


@dataclass(frozen=True)
class SurrogateType:
    """What a training step needs from a surrogate.

    Fields:
        summary: how the step is clipped, for command-line help.
        config: a dataclass of settings that validates itself. ``clip_low``, ``clip_high`` and ``dual_clip``, if it has
            them, are set by OpenRLHF's flags, with the paper's clip range as the default; any other field is a flag
            ``--actor.NAME.FIELD``.
        level: the level of its units. "token" works with any advantages, "sequence" needs one number per row.
        aggregation: what the paper takes the mean over: all tokens, or the means of the responses.
        loss: takes log_probs, old_log_probs, advantages, mask ((B, T) each) and config; raises ValueError for tensors
            that do not fit or are not finite.
        reads: what else it takes, by keyword: ``entropy``, (B, T) nats of the policy in training, detached;
            ``correct``, (B,) 1 where the response succeeded; ``accuracy``, (B,) share of its group that did.
    """

    summary: str
    config: type
    level: Level
    aggregation: Level
    loss: Callable[..., Surrogate]
    reads: tuple[str, ...] = ()


SURROGATES = {
    "gspo_token": SurrogateType(
        "GSPO's ratio, each token's own gradient", GSPOTokenConfig, "token", "sequence", gspo_token_surrogate
    ),
    "cispo": SurrogateType(
        "REINFORCE with clipped importance weights", CISPOConfig, "token", "token", cispo_surrogate
    ),
    "sapo": SurrogateType("a soft gate instead of a clip", SAPOConfig, "token", "sequence", sapo_surrogate),
    "gmpo": SurrogateType("geometric mean of clipped ratios", GMPOConfig, "sequence", "sequence", gmpo_surrogate),
    "clip_cov": SurrogateType(
        "no gradient for some tokens of high covariance", ClipCovConfig, "token", "token", clip_cov_surrogate
    ),
    "kl_cov": SurrogateType(
        "a KL penalty on the tokens of highest covariance", KLCovConfig, "token", "token", kl_cov_surrogate
    ),
    "stare": SurrogateType(
        "a weight for the tokens of highest surprisal", STAREConfig, "token", "token", stare_surrogate
    ),
    "hapo": SurrogateType(
        "advantages and clip range that depend on entropy",
        HAPOConfig,
        "token",
        "token",
        hapo_surrogate,
        ("entropy",),
    ),
    "htpo": SurrogateType(
        "an objective for each kind of token, by entropy, outcome and difficulty",
        HTPOConfig,
        "token",
        "token",
        htpo_surrogate,
        ("entropy", "correct", "accuracy"),
    ),
}
