"""What a training micro-batch spends no time on: waiting for the device, and gradients that nothing needs. Tensors on
``meta`` stand for the device's: they have no values that could be read."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience

from openrlhf_gtpo.training.actors.megatron_trainer import MegatronActorTrainer, _StepLoss
from openrlhf_gtpo.training.credit.loss import LossInputs, LossOutputs, StepTotals, make_policy_loss
from tests.support.rollouts import arguments

META = torch.device("meta")
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


WAITING = {"item", "tolist", "cpu", "nonzero", "masked_select", "__bool__", "__int__", "__float__", "__index__"}


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
