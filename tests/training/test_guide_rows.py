"""The guide's rows are compared with the guide: ratio, truncation and gradient, whatever the loss."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.credit.info import off_policy_rows
from openrlhf_gtpo.training.credit.loss import (
    LossFeature,
    LossInputs,
    LossOutputs,
    StepTotals,
    make_policy_loss,
    micro_batch_loss,
)
from openrlhf_gtpo.training.features.dumps.ratios import TokenRatios
from openrlhf_gtpo.training.features.guide.loss import GuideRatios
from tests.support.rollouts import arguments

CAP, LOW, HIGH = 1.5, 0.2, 2.5  # the clip of positive advantages lies beyond the cap
CLIP = ("--actor.eps_clip_low_high", str(LOW), str(HIGH - 1), "--algo.kl.init_coef", "0")
GUIDED = torch.tensor([False, True, True, False, True, True])


def batch(seed: int = 0, one_advantage: bool = False) -> dict[str, torch.Tensor]:
    """Ragged rows with holes, in float64; the guide is further from the policy than the old policy is."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows, width = len(GUIDED), 9
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 2] = True
    log_probs = -3 + normal(rows, width)
    return {
        "log_probs": (log_probs * mask).requires_grad_(),
        "old_log_probs": (log_probs + 0.1 * normal(rows, width)) * mask,
        "advantages": normal(rows, 1 if one_advantage else width).expand(rows, width) * mask,
        "action_mask": mask.long(),
        "rollout_log_probs": (log_probs + 0.8 * normal(rows, width)) * mask,
    }


def call(
    args: SimpleNamespace,
    data: dict[str, torch.Tensor],
    guided: torch.Tensor | None,
    *features: LossFeature,
    **more: Any,
) -> LossOutputs:
    """The whole loss of ``data``, as both trainers ask for it."""
    mask = data["action_mask"].bool()
    tensors = {name: values for name, values in data.items() if name != "action_mask"} | more
    totals = StepTotals(mask.sum(), mask.any(-1).sum())
    inputs = LossInputs(**tensors, mask=mask, totals=totals, off_policy=guided)  # type: ignore[arg-type]
    return micro_batch_loss(inputs, make_policy_loss(args), features or [GuideRatios(CAP)], args, 0.0)


def by_hand(data: dict[str, torch.Tensor], level: str) -> tuple[float, list[list[float]]]:
    """The loss and its derivative with respect to each log-prob, token by token."""
    rows, width = data["log_probs"].shape
    total, units = 0.0, 0
    slopes = [[0.0] * width for _ in range(rows)]
    for i in range(rows):
        tokens = [t for t in range(width) if data["action_mask"][i, t]]
        behavior = data["rollout_log_probs"] if GUIDED[i] else data["old_log_probs"]
        ratios = {t: math.exp(data["log_probs"][i, t].item() - behavior[i, t].item()) for t in tokens}
        if GUIDED[i]:
            ratios = {t: min(ratio, CAP) for t, ratio in ratios.items()}
        for unit in [[t] for t in tokens] if level == "token" else [tokens]:
            advantage = data["advantages"][i, unit[0]].item()
            ratio = sum(ratios[t] for t in unit) / len(unit)
            clipped = min(max(ratio, 1 - LOW), HIGH)
            total -= min(ratio * advantage, clipped * advantage)
            units += 1
            for t in unit:
                if ratio * advantage <= clipped * advantage:
                    slopes[i][t] = -advantage * ratios[t] / len(unit)
    return total / units, [[slope / units for slope in row] for row in slopes]


@pytest.mark.parametrize(
    ("level", "argv"),
    [
        ("token", ("--algo.advantage.estimator", "gtpo")),
        ("sequence", ("--algo.advantage.estimator", "grpo_s")),
        ("token", ("--algo.advantage.estimator", "group_norm")),
    ],
    ids=["gtpo", "grpo_s", "upstream's"],
)
def test_the_ratio_of_a_guide_row_is_to_the_guide_and_truncated(level: str, argv: tuple[str, ...]) -> None:
    """The loss and gradient of mixed rows are the loop's; a truncated ratio keeps its gradient."""
    args = arguments(*argv, *CLIP)
    truncated = 0
    for seed in range(5):
        data = batch(seed, one_advantage=level == "sequence")
        outputs = call(args, data, GUIDED)
        expected, slopes = by_hand(data, level)
        assert outputs.loss.item() == pytest.approx(expected, rel=1e-9)
        (gradient,) = torch.autograd.grad(outputs.loss, data["log_probs"])
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64))
        mask = data["action_mask"].bool()
        above = (data["log_probs"] - data["rollout_log_probs"]).exp() > CAP
        count = int((above & mask & GUIDED.unsqueeze(-1)).sum())
        assert outputs.metrics[names.GUIDE_TRUNCATED].item() == pytest.approx(count / int(mask.sum()))
        truncated += count
    assert truncated > 20


@pytest.mark.parametrize("name", ["cispo", "gmpo", "gspo_token", "sapo"])
def test_another_surrogate_gets_the_same_ratio(name: str) -> None:
    """It cannot tell the guide's rows from those of an old policy whose log-probs give the truncated ratio."""
    argv = ("--algo.advantage.estimator", "group_norm", "--actor.policy_loss_type", name, "--algo.kl.init_coef", "0")
    args = arguments(*argv)
    data = batch(one_advantage=name == "gmpo")
    ratio = (data["log_probs"].detach() - data["rollout_log_probs"]).exp().clamp(max=CAP)
    behavior = data["log_probs"].detach() - ratio.log()
    old = torch.where(GUIDED.unsqueeze(-1), behavior, data["old_log_probs"])
    expected, found = call(args, data | {"old_log_probs": old}, None), call(args, data, GUIDED)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.metrics["ppo_clip_ratio"], expected.metrics["ppo_clip_ratio"])
    torch.testing.assert_close(found.ratio, expected.ratio)
    assert torch.equal(found.clipped, expected.clipped)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
@pytest.mark.parametrize("correction", ["token", "seq"])
def test_the_correction_weighs_the_policys_rows_alone(correction: str, estimator: str) -> None:
    """Thresholds that drop whatever differs at all drop all of the policy's rows and nothing of the guide's."""
    argv = ("--algo.advantage.estimator", estimator, *CLIP, "--algo.advantage.is_correction_level", correction)
    args = arguments(*argv, "--algo.advantage.is_correction_threshold", "0.999999", "1.000001")
    data = batch()
    mask = data["action_mask"].bool()
    for rows in (GUIDED, torch.ones_like(GUIDED)):
        (gradient,) = torch.autograd.grad(call(args, data, rows).loss, data["log_probs"])
        assert gradient[rows][mask[rows]].abs().gt(0).any() and not gradient[~rows].any()


def test_beside_own_log_probs_and_in_dumps() -> None:
    """Without old log-probs, the policy's rows have a ratio of 1; a dump sees what the loss saw, of its own rows."""
    args, data, ratios = arguments("--algo.advantage.estimator", "gtpo", *CLIP), batch(), TokenRatios()
    labels = [None, *range(1, len(GUIDED))]
    outputs = call(args, data, GUIDED, GuideRatios(CAP), ratios, old_log_probs=None, labels=labels)
    wanted = (data["log_probs"] - data["rollout_log_probs"]).exp().clamp(max=CAP).where(GUIDED.unsqueeze(-1), 1)
    wanted = wanted.where(data["action_mask"].bool(), 1).detach().float()
    seen = ratios.take()
    assert list(seen) == labels[1:] and ratios.take() == {}
    for row, (ratio, clipped) in seen.items():
        torch.testing.assert_close(torch.tensor(ratio), wanted[row])
        assert torch.equal(torch.tensor(clipped), outputs.clipped[row])


def test_without_a_guide_nothing_is_touched() -> None:
    """Not one bit of the loss changes and no metric is added for a batch without marks."""
    inputs: list[LossInputs] = []

    class Watch(LossFeature):
        def loss_inputs(self, read: LossInputs) -> LossInputs:
            inputs.append(read)
            return read

    args, data = arguments("--algo.advantage.estimator", "gtpo", *CLIP), batch()
    guided = off_policy_rows(Experience(info={"reward": torch.ones(2)}))
    assert guided is None
    plain, watched = call(args, data, None, Watch()), call(args, data, guided, Watch(), GuideRatios(CAP), Watch())
    assert torch.equal(watched.loss, plain.loss) and set(watched.metrics) == set(plain.metrics)
    assert inputs[2] is inputs[1]
    assert not torch.equal(call(args, data, GUIDED).loss, plain.loss)
