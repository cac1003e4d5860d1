"""What a training micro-batch spends no time on: waiting for the device, and gradients that nothing needs. Tensors on
``meta`` stand for the device's: they have no values that could be read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from rollouts import arguments
from torch.overrides import TorchFunctionMode

from openrlhf_gtpo.integration.actors.megatron_trainer import _StepLoss
from openrlhf_gtpo.integration.credit.guide_rows import GuideRatios
from openrlhf_gtpo.integration.credit.loss import CreditLoss, loss_options
from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from openrlhf_gtpo.megatron.model.packing import pack

META = torch.device("meta")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


WAITING = {"item", "tolist", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__"}


class Waits(TorchFunctionMode):
    """Records the calls that need a number from the device on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += {function.__name__} & WAITING
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [(1, 0), (2, 1)])
def test_packing_waits_for_nothing(context: tuple[int, int]) -> None:
    rows = [(torch.arange(length), torch.arange(length) > 2) for length in (9, 5, 7)]
    here, there = (pack(rows, device, 8, context) for device in (torch.device("cpu"), META))
    for name in ("tokens", "position_ids", "predicts", "labels", *(["mine"] if context[0] > 1 else [])):
        assert getattr(there, name).is_meta and getattr(there, name).shape == getattr(here, name).shape
    assert there.params.cu_seqlens_q.is_meta and there.params.max_seqlen_q == here.params.max_seqlen_q


def step_loss(policy_loss: Any, device: torch.device) -> _StepLoss:
    """A step with one micro-batch, whose rows are on the host."""
    step = object.__new__(_StepLoss)
    step.args, step.kl_ctl = arguments("--algo.advantage.estimator", "gtpo"), 0.0
    ratios = GuideRatios(torch.nn.Identity(), 1.0)
    step.trainer = SimpleNamespace(_tell=lambda batch: None, reads=(), actor_loss_fn=policy_loss, guide_ratios=ratios)
    numbers = {name: torch.zeros(2, 3) for name in ("action_log_probs", "advantages", "rollout_log_probs")}
    step.experiences = [Experience(action_mask=MASK, sequences=torch.zeros(2, 5), **numbers)]
    counts = {"batch_num_tokens": torch.tensor(5.0), "global_batch_size": torch.tensor(2.0)}
    step._totals = {"dp_size": 1} | {name: count.to(device) for name, count in counts.items()}
    return step


def test_the_loss_takes_what_it_reads_and_metrics_stay_with_the_host() -> None:
    def policy_loss(log_probs: torch.Tensor, *given: torch.Tensor, **more: Any) -> Any:
        assert all(tensor.is_meta for tensor in (log_probs, *given, more["action_mask"], more["rollout_log_probs"]))
        return log_probs.sum(), *torch.zeros(2, device="meta"), None, None

    step = step_loss(policy_loss, META)
    total, metrics = step.loss(0, torch.zeros(5, device="meta"), None)
    assert total.is_meta and set(metrics) == {"policy_loss", "ppo_clip_ratio", "ppo_kl"}
    assert not any(value.is_meta for value in vars(step.experiences[0]).values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_entropies_that_are_only_logged_get_no_gradient(coefficient: float) -> None:
    """As upstream's ``--actor.entropy_coef 0``: one that overflows does not skip the step either."""
    step = step_loss(CreditLoss("token", **loss_options(arguments("--algo.advantage.estimator", "gtpo"))), MASK.device)
    step.args.actor.entropy_coef = coefficient
    entropy = torch.tensor([0.0, 1.0, 2.0, 3.0, torch.inf if coefficient == 0 else 4.0], requires_grad=True)
    total, metrics = step.loss(0, torch.zeros(5, requires_grad=True), entropy)
    total.backward()
    assert total.isfinite() and metrics["entropy_loss"] == entropy.detach().sum() / 5
    if coefficient == 0:
        assert entropy.grad is None
    else:
        torch.testing.assert_close(entropy.grad, torch.full((5,), -coefficient / 5))


@pytest.mark.parametrize(("level", "loss"), [("token", 1), ("sequence", 2)])
def test_a_micro_batch_waits_for_few_numbers(level: Any, loss: int) -> None:
    """They tell whether labels are in the vocabulary, and whether all is finite (and each row has one advantage)."""
    labels = torch.tensor([3, 0, 7, 1, 2])
    hidden, weight = torch.randn(5, 4), torch.randn(8, 4)
    step = step_loss(CreditLoss(level, **loss_options(arguments("--algo.advantage.estimator", "gtpo"))), hidden.device)
    with Waits() as head:
        log_probs, _ = linear_log_prob_and_entropy(hidden, weight, labels)
    with Waits() as of_loss:
        step.loss(0, log_probs, None)
    assert len(head.seen) == 1 and len(of_loss.seen) == loss, (head.seen, of_loss.seen)
