"""The single controller: upstream's trainer with the metrics of entropy credit and an evaluation before training."""

from typing import Any

import ray
from openrlhf.trainer import ppo_trainer

from openrlhf_gtpo.integration.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.integration.step_costs import StepCosts
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import MetricsWriter, is_number

_KL_COEFFICIENT = "kl_coefficient"  # in a checkpoint's client states, which upstream leaves it out of

_UpstreamTrainer: Any = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class


class EntropyTrainer(_UpstreamTrainer):  # type: ignore[misc]
    """Upstream's controller; what it logs goes to TensorBoard and W&B through upstream, and to ``metrics.jsonl``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.experience_maker = EntropyExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            self.strategy,
            self.tokenizer,
        )
        path = self.args.logger.metrics_path
        self.metrics_writer = MetricsWriter(path) if path else None
        self.costs = StepCosts(self.args, self.actor_model_group, self.vllm_engines)

    def fit(self, global_step: int = 0) -> None:
        """As upstream's, after one evaluation where ``--eval.before_training`` asks for it."""
        if self.args.eval.before_training and self.eval_dataloader is not None:
            resuming = self.init_checkpoint_states()["global_step"] > 0
            if not resuming:
                generation = self.generate_kwargs | {
                    "temperature": self.args.eval.temperature,
                    "n_samples_per_prompt": self.args.eval.n_samples_per_prompt,
                }
                self.evaluate(0, **generation)
        self.costs.begin()
        super().fit(global_step)

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        self.costs.sampled(rollout_samples)
        status, global_step = super().train_step(rollout_samples, global_step)
        self.costs.trained()
        status.update(self.experience_maker.metrics)
        if "ppo_clip_ratio" in status:
            status[names.CLIP_FRACTION] = status["ppo_clip_ratio"]
        return status, global_step

    def init_checkpoint_states(self) -> dict[str, Any]:
        """As upstream's; an adaptive KL coefficient goes on from where it was."""
        states = super().init_checkpoint_states()
        self.kl_ctl.value = states.get(_KL_COEFFICIENT, self.kl_ctl.value)
        return states

    def save_best_checkpoint(
        self, eval_metrics: dict[str, Any], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        super().save_best_checkpoint(eval_metrics, global_step, self._with_kl(client_states))
        self.costs.begin()

    def _with_kl(self, client_states: dict[str, Any] | None) -> dict[str, Any]:
        return (client_states or {}) | {_KL_COEFFICIENT: self.kl_ctl.value}

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        # Not earlier: upstream adds up everything that is called timing.
        logs = dict(logs_dict or {}) | self.costs.end() | self.experience_maker.seconds
        for phase in names.PHASES:
            if logs.get(names.timing(phase)):
                logs[names.tokens_per_second(phase)] = self.costs.response_tokens / logs[names.timing(phase)]
        if self.metrics_writer:
            numbers = {name: value for name, value in logs.items() if is_number(value)}
            self.metrics_writer.write(names.KIND_TRAIN, global_step, numbers)
        super().save_logs_and_checkpoints(global_step, logs, self._with_kl(client_states))
        self.costs.begin()

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        logs = super().evaluate(global_step, **generate_kwargs)
        if self.metrics_writer:
            self.metrics_writer.write(names.KIND_EVAL, global_step, logs)
        self.costs.begin()
        return logs


Trainer = ray.remote(EntropyTrainer)
