"""What a training micro-batch spends no time on: waiting for the device, and gradients that nothing needs. Tensors on
``meta`` stand for the device's: they have no values that could be read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience
from torch.overrides import TorchFunctionMode

from openrlhf_gtpo.lm_head import linear_log_prob_and_entropy
from openrlhf_gtpo.megatron.model.packing import pack
from openrlhf_gtpo.training.actors.megatron_trainer import MegatronActorTrainer, _StepLoss
from openrlhf_gtpo.training.credit.loss import LossInputs, LossOutputs, StepTotals, make_policy_loss
from tests.support.rollouts import arguments

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
    for name in ("tokens", "position_ids", "predicts", "labels", *(["is_local"] if context[0] > 1 else [])):
        assert getattr(there, name).is_meta and getattr(there, name).shape == getattr(here, name).shape
    assert there.params.cu_seqlens_q.is_meta and there.params.max_seqlen_q == here.params.max_seqlen_q


def step_loss(args: SimpleNamespace, device: torch.device, policy_loss: Any = None) -> _StepLoss:
    """A step with one micro-batch, whose rows are on the host."""
    trainer = object.__new__(MegatronActorTrainer)
    trainer.args, trainer.loss_features, trainer.policy_loss = args, [], policy_loss or make_policy_loss(args)
    step = object.__new__(_StepLoss)
    step.trainer, step.kl_coef = trainer, 0.0
    numbers = {name: torch.zeros(2, 3) for name in ("action_log_probs", "advantages", "rollout_log_probs")}
    step.experiences = [Experience(action_mask=MASK, sequences=torch.zeros(2, 5), **numbers)]
    step.totals = StepTotals(torch.tensor(5.0, device=device), torch.tensor(2.0, device=device))
    return step


def test_the_loss_takes_what_it_reads_and_metrics_stay_with_the_host() -> None:
    def policy_loss(inputs: LossInputs) -> LossOutputs:
        read = (inputs.log_probs, inputs.old_log_probs, inputs.advantages, inputs.mask, inputs.rollout_log_probs)
        assert all(tensor is not None and tensor.is_meta for tensor in read)
        loss = inputs.log_probs.sum()
        return LossOutputs(loss, {"policy_loss": loss}, inputs.log_probs, inputs.mask)

    step = step_loss(arguments("--algo.advantage.estimator", "gtpo"), META, policy_loss)
    total, metrics = step.loss(0, torch.zeros(5, device="meta"), None)
    assert total.is_meta and set(metrics) == {"policy_loss"}
    assert not any(value.is_meta for value in vars(step.experiences[0]).values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_entropies_that_are_only_logged_get_no_gradient(coefficient: float) -> None:
    """As upstream's ``--actor.entropy_coef 0``: one that overflows does not skip the step either."""
    args = arguments("--algo.advantage.estimator", "gtpo", "--actor.entropy_coef", f"{coefficient}")
    step = step_loss(args, MASK.device)
    entropy = torch.tensor([0.0, 1.0, 2.0, 3.0, torch.inf if coefficient == 0 else 4.0], requires_grad=True)
    total, metrics = step.loss(0, torch.zeros(5, requires_grad=True), entropy)
    total.backward()
    assert total.isfinite() and metrics["entropy_loss"] == entropy.detach().sum() / 5
    if coefficient == 0:
        assert entropy.grad is None
    else:
        torch.testing.assert_close(entropy.grad, torch.full((5,), -coefficient / 5))


@pytest.mark.parametrize(("estimator", "loss"), [("gtpo", 1), ("grpo_s", 2)])
def test_a_micro_batch_waits_for_few_numbers(estimator: str, loss: int) -> None:
    """They tell whether labels are in the vocabulary, and whether all is finite (and each row has one advantage)."""
    labels = torch.tensor([3, 0, 7, 1, 2])
    hidden, weight = torch.randn(5, 4), torch.randn(8, 4)
    step = step_loss(arguments("--algo.advantage.estimator", estimator), hidden.device)
    with Waits() as head:
        log_probs, _ = linear_log_prob_and_entropy(hidden, weight, labels)
    with Waits() as of_loss:
        step.loss(0, log_probs, None)
    assert len(head.seen) == 1 and len(of_loss.seen) == loss, (head.seen, of_loss.seen)
