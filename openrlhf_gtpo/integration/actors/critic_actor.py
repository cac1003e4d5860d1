"""The Ray actor that holds a critic, for upstream's `gae`: as upstream's, a whole optimizer step at a time."""

from typing import Any

import ray
from openrlhf.trainer.ray import ppo_critic
from openrlhf.trainer.ray.ppo_critic import CriticPPOTrainer

from openrlhf_gtpo.integration.actors.optimizer_steps import WholeSteps

_UpstreamCriticActor: Any = ppo_critic.CriticModelActor.__ray_metadata__.modified_class


class DeepspeedCriticTrainer(WholeSteps, CriticPPOTrainer):
    """Upstream's trainer of a critic; see ``WholeSteps``."""

    def ppo_train(self) -> dict[str, float]:
        """Train on everything in the replay buffer; returns upstream's metrics."""
        return self.train(self.critic, self.training_step)


class DeepspeedCriticActor(_UpstreamCriticActor):  # type: ignore[misc]
    """Upstream's critic actor with this package's trainer."""

    def init_model_from_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As upstream's."""
        ppo_critic.CriticPPOTrainer = DeepspeedCriticTrainer
        super().init_model_from_pretrained(*args, **kwargs)


CriticActor = ray.remote(num_gpus=1)(DeepspeedCriticActor)
