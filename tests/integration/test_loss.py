"""Would catch a policy loss inside OpenRLHF's trainer that is not the paper's: its ratio, clip, weights or normalisers."""

import math
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.utils.loss_utils import _optimizer_step_loss_norm

from openrlhf_gtpo.algorithms import policy_loss
from openrlhf_gtpo.integration.errors import TrainingStopped
from openrlhf_gtpo.integration.loss import FinitePolicyLoss, SequencePolicyLoss

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


def sequence_loss(ratio_mean: str, **options: Any) -> SequencePolicyLoss:
    return SequencePolicyLoss(ratio_mean=ratio_mean, clip_eps_low=LOW, clip_eps_high=HIGH, **options)


def reference(data: dict[str, torch.Tensor], level: str, ratio_mean: str, **options: Any) -> Any:
    return policy_loss(
        data["log_probs"],
        data["old_log_probs"],
        data["advantages"],
        data["action_mask"].bool(),
        level=level,  # type: ignore[arg-type]
        clip_low=LOW,
        clip_high=HIGH,
        ratio_mean=ratio_mean,  # type: ignore[arg-type]
        **options,
    )


def gradient(loss: torch.Tensor, data: dict[str, torch.Tensor]) -> torch.Tensor:
    (result,) = torch.autograd.grad(loss, data["log_probs"])
    return result


# ── Sequence level ──


@pytest.mark.parametrize("ratio_mean", MEANS)
@pytest.mark.parametrize("dual_clip", [None, 1.1])
@pytest.mark.parametrize("seed", range(3))
def test_it_is_the_papers_sequence_loss_forward_and_backward(
    ratio_mean: str, dual_clip: float | None, seed: int
) -> None:
    data = batch(seed=seed)
    loss, clip_ratio, approx_kl, vllm_kl, filtered = sequence_loss(ratio_mean, dual_clip=dual_clip)(**data)
    expected = reference(data, "sequence", ratio_mean, dual_clip=dual_clip)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(gradient(loss, data), gradient(expected.loss, data))
    torch.testing.assert_close(approx_kl, expected.approx_kl)
    assert not approx_kl.requires_grad and vllm_kl is None and filtered is None
    assert 0 < clip_ratio < 1


def test_dual_clip_changes_the_loss_it_is_tested_with() -> None:
    results = [sequence_loss("arithmetic", dual_clip=dual_clip)(**batch())[0] for dual_clip in (None, 1.1)]
    assert results[0] != results[1]


def test_the_geometric_ratio_is_upstreams_gspo() -> None:
    data = batch(seed=3)
    gspo = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, policy_loss_type="gspo")
    expected = gspo(**data)
    found = sequence_loss("geometric")(**data)
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(gradient(found[0], data), gradient(expected[0], data))
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])


def test_a_row_without_action_tokens_does_not_count() -> None:
    data = batch(seed=4)
    expected, *_ = sequence_loss("arithmetic")(**{name: values[1:] for name, values in data.items()})
    data["action_mask"][0] = 0
    loss, *_ = sequence_loss("arithmetic")(**data)
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(gradient(loss, data)).all() and (gradient_of_row_0(data) == 0).all()


def gradient_of_row_0(data: dict[str, torch.Tensor]) -> torch.Tensor:
    return gradient(sequence_loss("arithmetic")(**data)[0], data)[0]


def test_a_far_off_policy_row_stays_finite() -> None:
    data = batch(seed=5)
    data["log_probs"].data[0] += 500
    data["log_probs"].data[1] -= 500
    for ratio_mean in MEANS:
        loss, *_ = sequence_loss(ratio_mean)(**data)
        assert torch.isfinite(loss) and torch.isfinite(gradient(loss, data)).all()


# ── Token level: upstream's own loss is the paper's ──


@pytest.mark.parametrize("dual_clip", [None, 1.1])
def test_upstreams_token_loss_is_the_papers(dual_clip: float | None) -> None:
    data = batch("token", seed=6)
    loss, clip_ratio, approx_kl, *_ = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, dual_clip=dual_clip)(**data)
    expected = reference(data, "token", "arithmetic", dual_clip=dual_clip)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(gradient(loss, data), gradient(expected.loss, data))
    torch.testing.assert_close(clip_ratio, expected.clip_fraction)
    torch.testing.assert_close(approx_kl, expected.approx_kl)


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
            factors = weights if low <= of_row <= high else [0.0] * len(losses)
        elif correction.get("is_correction_mode") == "clip":
            factors = [min(max(s, low), high) for s in statistic]
        else:
            factors = [w if low <= s <= high else 0.0 for w, s in zip(weights, statistic)]
        rows.append([f * x for f, x in zip(factors, losses)])
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
    if level == "token":
        loss = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH, **correction)
    else:
        loss = sequence_loss(ratio_mean, **correction)
    found, _, _, vllm_kl, filtered = loss(**data)
    assert found.item() == pytest.approx(naive_loss(data, level, ratio_mean, correction), rel=1e-5)
    if correction["is_correction_level"] != "off":
        assert 0 < filtered < 1, "nothing or everything is filtered: the test shows nothing"
        mask = data["action_mask"]
        difference = ((data["rollout_log_probs"] - data["old_log_probs"]) * mask).sum() / mask.sum()
        torch.testing.assert_close(vllm_kl, difference)


# ── Micro-batches ──


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [2, 4, 1]], ids=str)
@pytest.mark.parametrize(("level", "ratio_mean"), [("token", "arithmetic"), *(("sequence", m) for m in MEANS)])
def test_micro_batches_sum_to_the_loss_of_the_whole_step(cuts: list[int], level: str, ratio_mean: str) -> None:
    data = batch(level, seed=8)
    loss_fn = PolicyLoss(clip_eps_low=LOW, clip_eps_high=HIGH) if level == "token" else sequence_loss(ratio_mean)
    pieces = [dict(zip(data, values)) for values in zip(*(v.split(cuts) for v in data.values()))]
    # Upstream's normalisers of one optimizer step; DeepSpeed divides every micro-batch's loss by their number.
    info = _optimizer_step_loss_norm([piece["action_mask"] for piece in pieces], None, 1, len(cuts))
    total = sum(loss_fn(**piece, **info)[0] / len(cuts) for piece in pieces)
    expected = reference(data, level, ratio_mean).loss
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(gradient(total, data), gradient(expected, data))


# ── A loss that is not finite ──


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_loss_that_is_not_finite_stops_before_its_backward_pass(level: str) -> None:
    loss_fn = FinitePolicyLoss(PolicyLoss() if level == "token" else sequence_loss("arithmetic"))
    data = batch(level, seed=9)
    expected = loss_fn.loss(**data)
    assert all(a is b or torch.equal(a, b) for a, b in zip(loss_fn(**data), expected))

    broken = batch(level, seed=9)
    broken["log_probs"].data[4, 2] = float("nan")
    with pytest.raises(TrainingStopped, match=r"^The policy loss is nan: row 4 of the micro-batch .* No weights"):
        loss_fn(**broken)

    endless = batch(level, seed=9)
    endless["advantages"] = endless["advantages"].clone()
    endless["advantages"][1] = float("inf")
    with pytest.raises(TrainingStopped, match="its log-probs are finite, but the loss overflows"):
        loss_fn(**endless)
