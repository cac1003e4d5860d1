"""The policy loss that trains is the paper's, inside OpenRLHF's trainer: its ratio, clip, weights and normalizers."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from openrlhf.models import aggregate_loss
from openrlhf.models.loss import PolicyLoss
from openrlhf.models.utils import compute_approx_kl

from openrlhf_gtpo.algorithms import SURROGATES, policy_surrogate
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.training.credit import loss as integration_loss
from openrlhf_gtpo.training.credit.loss import (
    CreditLoss,
    LossInputs,
    LossOutputs,
    StepTotals,
    UpstreamLoss,
    make_policy_loss,
    micro_batch_loss,
    rollout_correction,
)
from tests.support.rollouts import arguments

LOW, HIGH = 0.2, 0.28
MEANS = ("arithmetic", "geometric")


def batch(level: str = "sequence", seed: int = 0, rows: int = 7, width: int = 11) -> dict[str, torch.Tensor]:
    """Ragged rows with holes; log-probs 0 outside the mask, as upstream's actor returns them."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    mask = uniform(rows, width) < 0.7
    mask[:, 2] = True
    old = -0.05 - uniform(rows, width) * 3
    advantages = uniform(rows, 1 if level == "sequence" else width).expand(rows, width) * 4 - 2
    return {
        "log_probs": ((old + uniform(rows, width) - 0.5 + 1.6 * (uniform(rows, 1) - 0.5)) * mask).requires_grad_(),
        "old_log_probs": old * mask,
        "advantages": advantages * mask,
        "action_mask": mask.long(),
        "rollout_log_probs": (old + (uniform(rows, width) - 0.5) * 1.2).clamp(max=-0.05) * mask,
    }


def inputs_of(data: dict[str, torch.Tensor], totals: dict[str, Any] | None = None, **more: Any) -> LossInputs:
    """The micro-batch ``data``, alone in its optimizer step if ``totals`` does not say otherwise."""
    mask = data["action_mask"].bool()
    own = {"batch_num_tokens": mask.sum(), "global_batch_size": mask.any(-1).sum()}
    tensors = {name: values for name, values in data.items() if name != "action_mask"}
    return LossInputs(**tensors, mask=mask, totals=StepTotals(**own | (totals or {})), **more)  # type: ignore[arg-type]


def five(outputs: LossOutputs) -> tuple[torch.Tensor | None, ...]:
    """The loss and its metrics, as upstream's returns them."""
    names = ("ppo_clip_ratio", "ppo_kl", "vllm_kl", "is_filter_ratio")
    return outputs.loss, *(outputs.metrics.get(name) for name in names)


def credit_loss(level: str = "sequence", ratio_mean: str = "arithmetic", **options: Any) -> Callable[..., Any]:
    """A function of a batch and of the totals of its step, with the results of upstream's."""
    loss = CreditLoss(level, ratio_mean, clip_eps_low=LOW, clip_eps_high=HIGH, **options)  # type: ignore[arg-type]
    return lambda data, **totals: five(loss(inputs_of(data, totals)))


def reference(
    data: dict[str, torch.Tensor], level: str, ratio_mean: str, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean of the paper's terms, the share of them that was clipped, and the approximate KL divergence."""
    mask = data["action_mask"].bool()
    terms = policy_surrogate(
        data["log_probs"],
        data["old_log_probs"],
        data["advantages"],
        mask,
        **{"level": level, "clip_low": LOW, "clip_high": HIGH, "ratio_mean": ratio_mean} | options,  # type: ignore[arg-type]
    )
    units = terms.unit_mask.sum()
    return terms.loss.sum() / units, terms.clipped.sum() / units, terms.approx_kl.sum() / mask.sum()


def gradient(loss: torch.Tensor, data: dict[str, torch.Tensor]) -> torch.Tensor:
    (result,) = torch.autograd.grad(loss, data["log_probs"])
    return result


# ── Both levels ──


@pytest.mark.parametrize(("level", "ratio_mean"), [("token", "arithmetic"), *(("sequence", mean) for mean in MEANS)])
@pytest.mark.parametrize("dual_clip", [None, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_papers_loss_forward_and_backward(
    level: str, ratio_mean: str, dual_clip: float | None, seed: int
) -> None:
    data = batch(level, seed=seed)
    loss, clipped, approx_kl, vllm_kl, filtered = credit_loss(level, ratio_mean, dual_clip=dual_clip)(data)
    expected, clip_fraction, expected_kl = reference(data, level, ratio_mean, dual_clip=dual_clip)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient(loss, data), gradient(expected, data))
    torch.testing.assert_close(approx_kl, expected_kl)
    torch.testing.assert_close(clipped.mean(), clip_fraction)
    assert clipped.shape == (() if level == "token" else (len(data["log_probs"]),))
    assert 0 < clipped.mean() < 1 and not approx_kl.requires_grad and vllm_kl is None and filtered is None


def test_dual_clip_changes_the_loss_it_is_tested_with() -> None:
    for level in ("token", "sequence"):
        results = [credit_loss(level, dual_clip=dual_clip)(batch(level))[0] for dual_clip in (None, 1.1)]
        assert results[0] != results[1]


def test_whoever_changes_the_surrogate_changes_the_loss_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/algorithms.md names `policy_surrogate` as the place of the clipping."""
    data = batch("token")
    unclipped = credit_loss("token")
    before = unclipped(data)[0]
    surrogate = integration_loss.policy_surrogate
    monkeypatch.setattr(
        integration_loss, "policy_surrogate", lambda *args, **options: surrogate(*args, **options | {"clip_low": 1.0})
    )
    after = unclipped(data)[0]
    assert before != after
    assert after == reference(data, "token", "arithmetic", clip_low=1.0)[0]


@pytest.mark.parametrize("dual_clip", [None, 1.1])
def test_the_token_loss_is_upstreams(dual_clip: float | None) -> None:
    data = batch("token", seed=6)
    expected = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, dual_clip=dual_clip)(**data)
    found = credit_loss("token", dual_clip=dual_clip)(data)
    torch.testing.assert_close(found[:3], expected[:3])
    torch.testing.assert_close(gradient(found[0], data), gradient(expected[0], data))


def test_the_geometric_ratio_is_upstreams_gspo() -> None:
    data = batch(seed=3)
    gspo = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, policy_loss_type="gspo")
    expected = gspo(**data)
    found = credit_loss("sequence", "geometric")(data)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(gradient(found[0], data), gradient(expected[0], data))
    torch.testing.assert_close(found[2], expected[2])


def test_a_row_without_action_tokens_does_not_count() -> None:
    data = batch(seed=4)
    expected, *_ = credit_loss()({name: values[1:] for name, values in data.items()})
    data["action_mask"][0] = 0
    loss, *_ = credit_loss()(data)
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(gradient(loss, data)).all() and (gradient(credit_loss()(data)[0], data)[0] == 0).all()


@pytest.mark.parametrize("correction", [{}, {"is_correction_level": "token"}, {"is_correction_level": "seq"}], ids=str)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_micro_batch_without_action_tokens_adds_nothing(level: str, correction: dict[str, Any]) -> None:
    data = batch(level, seed=4)
    data["action_mask"][:] = 0
    info = {"dp_size": 2, "batch_num_tokens": torch.tensor(5.0), "global_batch_size": torch.tensor(3.0)}
    loss, *metrics = credit_loss(level, **correction)(data, **info)
    assert loss == 0 and (gradient(loss, data) == 0).all()
    assert all(torch.isfinite(metric).all() for metric in metrics if metric is not None)


def test_a_far_off_policy_row_stays_finite() -> None:
    for level, ratio_mean in [("token", "arithmetic"), *(("sequence", mean) for mean in MEANS)]:
        data = batch(level, seed=5)
        data["log_probs"].data[0] += 500
        data["log_probs"].data[1] -= 500
        loss, *_ = credit_loss(level, ratio_mean)(data)
        assert torch.isfinite(loss) and torch.isfinite(gradient(loss, data)).all()


# ── Train-rollout correction, against a loop over floats ──


CORRECTIONS = {
    "off": {"is_correction_level": "off"},
    "token mask": {"is_correction_level": "token", "is_correction_threshold": [0.8, 1.3]},
    "token clip": {
        "is_correction_level": "token",
        "is_correction_mode": "clip",
        "is_correction_threshold": [0.8, 1.3],
    },
    "token trust region": {
        "is_correction_level": "token",
        "is_correction_gating": "binary_kl",
        "is_correction_threshold": [0.0, 0.02],
    },
    "token cap": {"is_correction_level": "token", "is_correction_mode": "clip", "is_correction_threshold": [0.0, 1.1]},
    "seq mask": {"is_correction_level": "seq", "is_correction_threshold": [0.95, 1.2]},
    "seq trust region": {
        "is_correction_level": "seq",
        "is_correction_gating": "tv",
        "is_correction_threshold": [0.0, 0.08],
    },
}


def divergence(gating: str, old: float, rollout: float) -> float:
    p, q = math.exp(rollout), math.exp(old)
    if gating == "tv":
        return abs(p - q)
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


def naive_loss(data: dict[str, torch.Tensor], level: str, ratio_mean: str, correction: dict[str, Any]) -> float:
    """The loss of a batch, one float at a time."""
    low, high = correction.get("is_correction_threshold", (0.5, 5.0))
    gating = correction.get("is_correction_gating", "ratio")
    rows = []
    for i, keep in enumerate(data["action_mask"].tolist()):
        columns = [t for t, k in enumerate(keep) if k]
        new, old, rollout, advantage = (
            [float(data[name][i, t].detach()) for t in columns]
            for name in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages")
        )
        ratios = [math.exp(n - o) for n, o in zip(new, old)]
        if level == "sequence":
            mean_log = math.fsum(n - o for n, o in zip(new, old)) / len(new)
            one = math.exp(mean_log) if ratio_mean == "geometric" else math.fsum(ratios) / len(ratios)
            ratios = [one] * len(ratios)
        losses = [-min(w * a, min(max(w, 1 - LOW), 1 + HIGH) * a) for w, a in zip(ratios, advantage)]
        weights = [math.exp(o - r) for o, r in zip(old, rollout)]
        if gating == "ratio":
            statistic = weights
        else:
            statistic = [divergence(gating, o, r) for o, r in zip(old, rollout)]
        if correction["is_correction_level"] == "off":
            factors = [1.0] * len(losses)
        elif correction["is_correction_level"] == "seq":
            if gating == "ratio":
                of_row = math.exp(math.fsum(o - r for o, r in zip(old, rollout)) / len(old))
            else:
                of_row = math.fsum(statistic) / len(statistic)
            factors = [min(w, 5.0) for w in weights] if low <= of_row <= high else [0.0] * len(losses)
        elif correction.get("is_correction_mode") == "clip":
            factors = [min(max(s, low), high) for s in statistic]
        else:
            factors = [w if low <= s <= high else 0.0 for w, s in zip(weights, statistic)]
        rows.append([f * x for f, x in zip(factors, losses)])
        if ratio_mean == "geometric":
            kept = [f for f in factors if f > 0]
            of_row = math.exp(math.fsum(map(math.log, kept)) / len(kept)) if kept else 0.0
            rows[-1] = [of_row * losses[0]]
    if level == "token":
        return math.fsum(x for row in rows for x in row) / sum(len(row) for row in rows)
    return math.fsum(math.fsum(row) / len(row) for row in rows) / len(rows)


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
@pytest.mark.parametrize(
    ("level", "ratio_mean"), [("token", "arithmetic"), ("sequence", "arithmetic"), ("sequence", "geometric")]
)
def test_train_rollout_correction_keeps_its_meaning_with_both_levels(
    correction: dict[str, Any], level: str, ratio_mean: str
) -> None:
    data = batch(level, seed=7)
    found, _, _, vllm_kl, filtered = credit_loss(level, ratio_mean, **correction)(data)
    assert found.item() == pytest.approx(naive_loss(data, level, ratio_mean, correction), rel=1e-5)
    if correction["is_correction_level"] != "off":
        of_upstream = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, **correction)(**data)
        torch.testing.assert_close(filtered.mean(), of_upstream[4])
        assert filtered.dim() == (
            correction["is_correction_level"] == "seq"
        ), "a value for each row, or a mean over tokens"
        assert 0 < filtered.mean() < 1, "nothing or everything is filtered: the test shows nothing"
        mask = data["action_mask"]
        difference = ((data["rollout_log_probs"] - data["old_log_probs"]) * mask).sum() / mask.sum()
        torch.testing.assert_close(vllm_kl, difference)


@pytest.mark.parametrize("gating", ["ratio", "binary_kl", "tv"])
def test_one_token_does_not_give_its_response_any_weight(gating: str) -> None:
    """It passes the gate of a whole response and, as it is rare, that of its own divergence."""
    rollout = torch.full((1, 500), -1.0)
    rollout[0, 0] = -12.0
    old, mask = rollout.clone(), torch.ones(1, 500, dtype=torch.bool)
    old[0, 0] += 8

    def weights(level: str, gating: str, mode: str, threshold: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"level": level, "gating": gating, "mode": mode, "threshold": threshold}
        options = {f"is_correction_{name}": value for name, value in given.items()}
        loss = CreditLoss("sequence", clip_eps_low=LOW, clip_eps_high=HIGH, **options)
        return rollout_correction(loss.options, old, rollout, mask)

    for level in ("seq", "token"):
        weight, filtered = weights(level, gating, "mask", [0.5, 5.0] if gating == "ratio" else [0.0, 0.05])
        assert weight.max() <= 5 and weight.mean() <= 1 + 4 / 500
        assert filtered.sum() == 0 or (level, gating) == ("token", "ratio")
    weight, _ = weights("token", "ratio", "clip", [0.0, 5.0])
    torch.testing.assert_close(weight, torch.tensor([[5.0] + [1.0] * 499]))  # min(ratio, cap)


@pytest.mark.parametrize("level", ["token", "seq"])
def test_a_divergence_that_rounding_makes_negative_is_in_the_trust_region(level: str) -> None:
    data = batch("token", seed=7, rows=64)
    data["rollout_log_probs"] = (data["old_log_probs"] + 1e-5) * data["action_mask"]
    correction = {"is_correction_gating": "binary_kl", "is_correction_threshold": [0.0, 0.02]}
    loss, *_, filtered = credit_loss("token", is_correction_level=level, **correction)(data)
    assert filtered.max() == 0
    torch.testing.assert_close(loss, credit_loss("token")(data)[0])


# ── Micro-batches ──


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [2, 4, 1]], ids=str)
@pytest.mark.parametrize(("level", "ratio_mean"), [("token", "arithmetic"), *(("sequence", m) for m in MEANS)])
def test_micro_batches_sum_to_the_loss_of_the_whole_step(cuts: list[int], level: str, ratio_mean: str) -> None:
    data = batch(level, seed=8)
    loss_fn = credit_loss(level, ratio_mean)
    pieces = [dict(zip(data, values)) for values in zip(*(v.split(cuts) for v in data.values()))]
    # A quarter of the rows of the step are here; the gradients of 4 replicas are averaged.
    tokens, rows = data["action_mask"].sum() * 4.0, torch.tensor(len(data["action_mask"]) * 4.0)
    info = {"dp_size": 4, "batch_num_tokens": tokens, "global_batch_size": rows}
    total = sum(loss_fn(piece, **info)[0] for piece in pieces)
    expected = reference(data, level, ratio_mean)[0]
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient(total, data), gradient(expected, data))


# ── Other surrogates ──


def other_loss(name: str, level: str, **options: Any) -> tuple[CreditLoss, Callable[..., Any]]:
    """The loss of the surrogate ``name``, with its mean at ``level``, and that as in :func:`credit_loss`."""
    kind = SURROGATES[name]
    surrogate = partial(kind.loss, config=kind.config())
    settings = {"surrogate": surrogate, "reads": kind.reads, "clip_eps_low": LOW, "clip_eps_high": HIGH}
    loss = CreditLoss(level, **settings, **options)  # type: ignore[arg-type]
    return loss, lambda data, **totals: five(loss(inputs_of(data, totals, **read(name, data))))


def read(name: str, data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the surrogate reads besides, made up from the rows of ``data``."""
    known = {
        "entropy": data["log_probs"].detach().abs(),
        "correct": data["advantages"][:, 2] > 0,
        "accuracy": data["old_log_probs"][:, 2].exp(),
    }
    return {key: known[key] for key in SURROGATES[name].reads}


# Without those that see a micro-batch's tokens together, which depend on how a step is split.
OF_TOKENS_ALONE = [
    (name, level)
    for name, kind in SURROGATES.items()
    for level in ("token", "sequence")
    if not name.endswith("_cov") and name != "hapo" and (level == "sequence" or kind.level == "token")
]


@pytest.mark.parametrize("cuts", [[1] * 7, [2, 4, 1]], ids=str)
@pytest.mark.parametrize(("name", "level"), OF_TOKENS_ALONE)
def test_a_surrogates_micro_batches_sum_to_its_mean(name: str, level: str, cuts: list[int]) -> None:
    data = batch(seed=8)
    loss, loss_fn = other_loss(name, level)
    assert loss.surrogate is not None
    unreduced = loss.surrogate(
        *(data[key] for key in ("log_probs", "old_log_probs", "advantages")),
        data["action_mask"].bool(),
        **read(name, data),
    ).loss
    if level == "token":
        expected = unreduced.sum() / data["action_mask"].sum()
    elif unreduced.dim() == 2:
        expected = (unreduced.sum(-1) / data["action_mask"].sum(-1)).mean()
    else:
        expected = unreduced.mean()
    torch.testing.assert_close(loss_fn(data)[0], expected)
    pieces = [dict(zip(data, values)) for values in zip(*(v.split(cuts) for v in data.values()))]
    tokens, rows = data["action_mask"].sum() * 4.0, torch.tensor(len(data["action_mask"]) * 4.0)
    info = {"dp_size": 4, "batch_num_tokens": tokens, "global_batch_size": rows}
    total = sum(loss_fn(piece, **info)[0] for piece in pieces)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient(total, data), gradient(expected, data))


def test_gspo_token_with_a_mean_over_responses_is_upstreams_gspo() -> None:
    data = batch(seed=3)
    kind = SURROGATES["gspo_token"]
    surrogate = partial(kind.loss, config=kind.config(clip_low=LOW, clip_high=HIGH))
    found = five(CreditLoss("sequence", surrogate=surrogate, clip_eps_low=LOW, clip_eps_high=HIGH)(inputs_of(data)))
    expected = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, policy_loss_type="gspo")(**data)
    torch.testing.assert_close(found[:3], expected[:3])
    torch.testing.assert_close(gradient(found[0], data), gradient(expected[0], data))


@pytest.mark.parametrize("correction", [CORRECTIONS["token clip"], CORRECTIONS["seq mask"]], ids=str)
@pytest.mark.parametrize("name", SURROGATES)
def test_the_correction_weighs_every_surrogate(name: str, correction: dict[str, Any]) -> None:
    """It multiplies a token's term by the token's weight, a response's by the geometric mean over the tokens kept."""
    data = batch(seed=7)
    loss, loss_fn = other_loss(name, "sequence", **correction)
    mask = data["action_mask"].bool()
    terms = (data[key] for key in ("log_probs", "old_log_probs", "advantages"))
    assert loss.surrogate is not None
    surrogate = loss.surrogate(*terms, mask, **read(name, data))
    weights, _ = rollout_correction(loss.options, data["old_log_probs"], data["rollout_log_probs"], mask)
    per_row = mask.sum(-1)
    if surrogate.loss.dim() == 2:
        expected = ((surrogate.loss * weights).where(mask, 0).sum(-1) / per_row).mean()
    else:
        kept = mask & (weights > 0)
        of_rows = (weights.log().where(kept, 0).sum(-1) / kept.sum(-1).clamp_min(1)).exp() * kept.any(-1)
        expected = (surrogate.loss * of_rows).mean()
    torch.testing.assert_close(loss_fn(data)[0], expected)


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_without_tokens_adds_nothing_and_stops_at_what_is_not_finite(name: str) -> None:
    data = batch(seed=4)
    _, loss_fn = other_loss(name, "sequence")
    empty = data | {"action_mask": torch.zeros_like(data["action_mask"])}
    loss = loss_fn(empty, batch_num_tokens=torch.tensor(5.0), global_batch_size=torch.tensor(3.0))[0]
    assert loss == 0 and (gradient(loss, data) == 0).all()
    data["log_probs"] = data["log_probs"].detach().clone()
    data["log_probs"][4, 2] = math.nan
    assert loss_fn(data)[0].isnan()
    data["advantages"] = data["advantages"].clone()
    data["advantages"][4, 2] = math.nan
    with pytest.raises(TrainingStopped, match="advantages of row 4 is nan"):
        loss_fn(data)


# ── What is not finite ──


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("name", ["old_log_probs", "advantages"])
def test_what_is_not_finite_stops_before_its_backward_pass(level: str, name: str) -> None:
    for bad in (float("nan"), float("inf")):
        data = batch(level, seed=9)
        data[name] = data[name].detach().clone()
        data[name][4, 2] = bad
        with pytest.raises(
            TrainingStopped, match=rf"^The policy loss of a micro-batch: {name} of row 4 is .* It changed no weight"
        ):
            credit_loss(level)(data)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_log_prob_that_is_not_finite_makes_the_loss_nan(level: str, bad: float) -> None:
    """Its optimizer step is then skipped on every rank; outside the mask, the log-prob counts for nothing."""
    data = batch(level, seed=9)
    expected = credit_loss(level)(data)[0]
    outside = (~data["action_mask"].bool()).nonzero()[0]
    data["log_probs"] = data["log_probs"].detach().clone()
    data["log_probs"][tuple(outside)] = bad
    assert credit_loss(level)(data)[0] == expected
    data["log_probs"][4, 2] = bad
    assert credit_loss(level)(data)[0].isnan()
    estimator = "gtpo" if level == "token" else "grpo_s"
    args = arguments("--algo.advantage.estimator", estimator, "--algo.kl.init_coef", "0")
    inputs = replace(inputs_of(data), old_log_probs=None)
    assert micro_batch_loss(
        inputs, make_policy_loss(args), [], args, 0.0
    ).loss.isnan(), "even if they are the old ones"


# ── The whole loss ──


def test_upstreams_estimators_have_upstreams_loss() -> None:
    """Bit by bit, and its clip is shown where it decides."""
    data = batch("token", seed=2)
    for options in ({}, {"policy_loss_type": "gspo"}, CORRECTIONS["token mask"]):
        options = {"clip_eps_low": LOW, "clip_eps_high": HIGH} | options
        expected = PolicyLoss(**options)(**data)
        outputs = UpstreamLoss(**options)(inputs_of(data))
        assert all(
            found is wanted is None or torch.equal(found, wanted) for found, wanted in zip(five(outputs), expected)
        )
        assert torch.equal(gradient(outputs.loss, data), gradient(expected[0], data))
        mask = data["action_mask"].bool()
        assert not outputs.clipped[~mask].any() and (outputs.ratio[~mask] == 1).all()
        assert outputs.clipped.sum() / mask.sum() == pytest.approx(expected[1].item())


@pytest.mark.parametrize("unbiased", [(), ("--algo.kl.unbiased_gradient",)])
@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
def test_the_loss_is_the_sum_of_its_parts(estimator: str, unbiased: tuple[str, ...]) -> None:
    """Policy loss, KL loss and router's loss less the entropy bonus, each over the counts of the whole step."""
    kl_loss = ("--algo.kl.use_loss", "--algo.kl.init_coef", "0.1", "--algo.kl.estimator", "k3", *unbiased)
    args = arguments("--algo.advantage.estimator", estimator, *kl_loss, "--actor.entropy_coef", "0.03")
    data = batch("token", seed=3)
    totals = {"batch_num_tokens": torch.tensor(99.0), "global_batch_size": torch.tensor(9.0), "dp_size": 2}
    entropy = torch.rand(data["log_probs"].shape, requires_grad=True)
    router = torch.tensor(0.7, requires_grad=True)
    base = data["old_log_probs"] - 0.2
    inputs = inputs_of(data, totals, base_log_probs=base, entropy=entropy, router_loss=router)
    policy_loss = make_policy_loss(args)
    outputs = micro_batch_loss(inputs, policy_loss, [], args, 0.5)
    old, flag = data["old_log_probs"], bool(unbiased)
    kl = aggregate_loss(
        compute_approx_kl(data["log_probs"], base, old, "k3", flag), data["action_mask"], **totals  # type: ignore[arg-type]
    )
    bonus = (entropy * data["action_mask"]).sum() / 99 * 2
    parts = {"policy_loss": policy_loss(inputs).loss, "kl": kl, "entropy_loss": bonus}
    for name, part in parts.items():
        torch.testing.assert_close(outputs.metrics[name], part.detach())
    expected = parts["policy_loss"] + 0.5 * kl + router - 0.03 * bonus
    torch.testing.assert_close(outputs.loss, expected)
    leaves = (data["log_probs"], entropy, router)
    torch.testing.assert_close(torch.autograd.grad(outputs.loss, leaves), torch.autograd.grad(expected, leaves))
