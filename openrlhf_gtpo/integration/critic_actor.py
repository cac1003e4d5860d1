"""The Ray actor that holds a critic, for upstream's `gae`: as upstream's, a whole optimizer step at a time."""

from typing import Any

import ray
import torch
from openrlhf.trainer.ray import ppo_critic
from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer

from openrlhf_gtpo.integration.optimizer_steps import WholeSteps
from openrlhf_gtpo.integration.step_metrics import StepMetrics

_UpstreamCriticActor: Any = ppo_critic.CriticModelActor.__ray_metadata__.modified_class


class DeepspeedCriticTrainer(WholeSteps, CriticPPOTrainer):
    """Upstream's trainer of a critic; see ``WholeSteps``."""

    def ppo_train(self) -> dict[str, float]:
        """Train on everything in the replay buffer; returns upstream's metrics, averaged over the replicas."""
        metrics = StepMetrics(self.args, self.strategy.ds_device_mesh["dp"].size())
        last: dict[str, float] = {}
        for step, experience, rows in self.micro_batches(self.critic):
            status = self.training_step(experience, step)
            last = {name: status.pop(name) for name in ("critic_lr", "critic_grad_norm")}
            if rows:
                values = {name: torch.tensor(value) for name, value in status.items()}
                metrics.add(values, float(experience.action_mask.sum()), rows)
        return metrics.averages(sum(self.replay_buffer.dynamic_optimizer_step), self.is_reporter()) | last


class DeepspeedCriticActor(_UpstreamCriticActor):  # type: ignore[misc]
    """Upstream's critic actor with this package's trainer."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's."""
        ppo_critic.CriticPPOTrainer = DeepspeedCriticTrainer
        super().init_model_from_pretrained(*args, **kwargs)


CriticActor = ray.remote(num_gpus=1)(DeepspeedCriticActor)
