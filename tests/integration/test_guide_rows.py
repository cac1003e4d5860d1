"""The guide's rows are compared with the guide: ratio, truncation and gradient, whatever the loss."""

import math
from typing import Any

import pytest
import torch
from openrlhf.models.loss import PolicyLoss
from openrlhf.trainer.ppo_utils.experience import Experience
from rollouts import arguments

from openrlhf_gtpo.integration.actors.actor_trainer import _own_as_old
from openrlhf_gtpo.integration.actors.token_ratios import TokenRatios
from openrlhf_gtpo.integration.credit.guide_rows import GuideRatios, guide_rows
from openrlhf_gtpo.integration.credit.loss import credit_loss
from openrlhf_gtpo.report import names

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


def call(loss: PolicyLoss, data: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Call ``loss`` as both trainers do."""
    first = [data[name] for name in ("log_probs", "old_log_probs", "advantages")]
    return loss(*first, action_mask=data["action_mask"], rollout_log_probs=data["rollout_log_probs"])


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
    loss = credit_loss(arguments(*argv, *CLIP)) or PolicyLoss(LOW, HIGH - 1)
    ratios = GuideRatios(loss, CAP)
    ratios.rows = GUIDED
    truncated = 0
    for seed in range(5):
        data = batch(seed, one_advantage=level == "sequence")
        value = call(loss, data)[0]
        expected, slopes = by_hand(data, level)
        assert value.item() == pytest.approx(expected, rel=1e-9)
        (gradient,) = torch.autograd.grad(value, data["log_probs"])
        torch.testing.assert_close(gradient, torch.tensor(slopes, dtype=torch.float64))
        mask = data["action_mask"].bool()
        above = (data["log_probs"] - data["rollout_log_probs"]).exp() > CAP
        count = int((above & mask & GUIDED.unsqueeze(-1)).sum())
        assert ratios.metrics()[names.GUIDE_TRUNCATED].item() == pytest.approx(count / int(mask.sum()))
        truncated += count
    assert truncated > 20


@pytest.mark.parametrize("name", ["cispo", "gmpo", "gspo_token", "sapo"])
def test_another_surrogate_gets_the_same_ratio(name: str) -> None:
    """It cannot tell the guide's rows from those of an old policy whose log-probs give the truncated ratio."""
    argv = ("--algo.advantage.estimator", "group_norm", "--actor.policy_loss_type", name, "--algo.kl.init_coef", "0")
    plain, guided = (credit_loss(arguments(*argv)) for _ in range(2))
    data = batch(one_advantage=name == "gmpo")
    assert plain is not None and guided is not None
    GuideRatios(guided, CAP).rows = GUIDED
    ratio = (data["log_probs"].detach() - data["rollout_log_probs"]).exp().clamp(max=CAP)
    behavior = data["log_probs"].detach() - ratio.log()
    old = torch.where(GUIDED.unsqueeze(-1), behavior, data["old_log_probs"])
    expected = call(plain, data | {"old_log_probs": old})
    torch.testing.assert_close(call(guided, data), expected, equal_nan=True)


@pytest.mark.parametrize("estimator", ["gtpo", "group_norm"])
@pytest.mark.parametrize("correction", ["token", "seq"])
def test_the_correction_weighs_the_policys_rows_alone(correction: str, estimator: str) -> None:
    """Thresholds that drop whatever differs at all drop all of the policy's rows and nothing of the guide's."""
    argv = ("--algo.advantage.estimator", estimator, *CLIP, "--algo.advantage.is_correction_level", correction)
    args = arguments(*argv, "--algo.advantage.is_correction_threshold", "0.999999", "1.000001")
    options = {name: value for name, value in vars(args.algo.advantage).items() if name.startswith("is_correction_")}
    loss = credit_loss(args) or PolicyLoss(LOW, HIGH - 1, **options)
    ratios = GuideRatios(loss, CAP)
    data = batch()
    mask = data["action_mask"].bool()
    for rows in (GUIDED, torch.ones_like(GUIDED)):
        ratios.rows = rows
        (gradient,) = torch.autograd.grad(call(loss, data)[0], data["log_probs"])
        assert gradient[rows][mask[rows]].abs().gt(0).any() and not gradient[~rows].any()


def test_beside_own_log_probs_and_in_dumps() -> None:
    """Without old log-probs, the policy's rows have a ratio of 1; a dump sees what the loss saw."""
    loss = credit_loss(arguments("--algo.advantage.estimator", "gtpo", *CLIP))
    assert loss is not None
    loss.register_forward_pre_hook(_own_as_old)
    guide, seen = GuideRatios(loss, CAP), TokenRatios(loss)
    guide.rows, seen.rows = GUIDED, range(len(GUIDED))
    data = batch()
    loss(data["log_probs"], None, data["advantages"], action_mask=data["action_mask"],
         rollout_log_probs=data["rollout_log_probs"])  # fmt: skip
    wanted = (data["log_probs"] - data["rollout_log_probs"]).exp().clamp(max=CAP).where(GUIDED.unsqueeze(-1), 1)
    wanted = wanted.where(data["action_mask"].bool(), 1).detach().float()
    for row, (ratio, _) in seen.take().items():
        torch.testing.assert_close(torch.tensor(ratio), wanted[row])


def test_without_a_guide_nothing_is_touched() -> None:
    """Not one bit of the loss changes and no metric is added, even for a batch without marks after one with them."""
    plain, watched = (credit_loss(arguments("--algo.advantage.estimator", "gtpo", *CLIP)) for _ in range(2))
    assert plain is not None and watched is not None
    ratios = GuideRatios(watched, CAP)
    ratios.rows = GUIDED
    assert not torch.equal(call(watched, batch())[0], call(plain, batch())[0])
    ratios.rows = guide_rows(Experience(info={"reward": torch.ones(2)}))
    assert ratios.rows is None and ratios.metrics() == {}
    given: list[Any] = []
    watched.register_forward_hook(lambda loss, inputs, options, output: given.append(inputs), with_kwargs=True)
    data = batch()
    assert torch.equal(call(watched, data)[0], call(plain, data)[0]) and given[0][1] is data["old_log_probs"]
