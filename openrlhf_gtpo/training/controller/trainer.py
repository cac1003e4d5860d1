"""The single controller: upstream's trainer with the metrics of entropy credit, an evaluation before training, and a
stop on request.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.logging_utils import TensorboardLogger, WandbLogger

from openrlhf_gtpo.checkpoints.folder import CheckpointWriteError
from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.heartbeat import Heartbeat
from openrlhf_gtpo.report.metrics import MetricsWriter, Rows, is_number
from openrlhf_gtpo.training.actors.actor_trainer import keep_trying, wait_for_engines
from openrlhf_gtpo.training.controller.engines import Engines, kill_hanging, start_guide
from openrlhf_gtpo.training.controller.failures import answering, write_errors
from openrlhf_gtpo.training.controller.metrics import eval_metrics, held_out_statistics, sources_of, step_warnings
from openrlhf_gtpo.training.controller.rollout_dump import RolloutDumper
from openrlhf_gtpo.training.controller.spikes import Spikes
from openrlhf_gtpo.training.controller.step_costs import StepCosts
from openrlhf_gtpo.training.controller.stop import stop_file
from openrlhf_gtpo.training.controller.wandb_run import WandbRun
from openrlhf_gtpo.training.credit.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.training.credit.old_policy import count_all_steps
from openrlhf_gtpo.training.rollout.guide import Guide
from openrlhf_gtpo.training.rollout.replay import ReplayedSamples
from openrlhf_gtpo.training.rollout.samples_generator import OrderedSamplesGenerator, SharedTokenizer

# Keys in a checkpoint's client states for what upstream leaves out of them.
_KL_COEFFICIENT, _AUDIT, _RECENT, _RESCUE = "kl_coefficient", "audit", "recent_metrics", "rescue"

# What upstream's (0.11.2) init_checkpoint_states returns if --ckpt.load_enable finds no folder.
_FRESH = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, "data_loader_state_dict": {}}

_SAMPLE_LENGTH = 2000  # characters kept from the end of a step's sample

_UpstreamTrainer: Any = ppo_trainer.PPOTrainer.__ray_metadata__.modified_class


class FlushedTensorboard(TensorboardLogger):
    """Upstream's logger; its logs are on disk before a checkpoint follows (torch's writer may hold them for 120 s). A
    full disk costs a log and not the run."""

    def log_train(self, *args: Any) -> None:
        self._log(super().log_train, *args)

    def log_eval(self, *args: Any) -> None:
        self._log(super().log_eval, *args)

    def _log(self, log: Callable[..., None], step: int, logs: Mapping[str, Any]) -> None:
        try:
            log(step, logs)
            self.writer.flush()
        except OSError as error:
            print(f"Warning: TensorBoard misses logs of step {step} ({error.strerror}).", flush=True)
            # Its thread may have ended; the next event opens another file.
            self.writer.file_writer = self.writer.all_writers = None

    def go_on(self, step: int) -> None:
        """Have TensorBoard discard what it was told about the steps after ``step``, which are run again."""
        self.writer.close()  # the next event opens a file, in which the purge comes first
        self.writer.purge_step = step + 1


class ResumedWandb(WandbLogger):
    """Upstream's logger; a run that is started again goes on in its W&B run, which gets each step once."""

    def __init__(self, args: Any) -> None:
        self._run = WandbRun(args)
        self._run.open()
        super().__init__(args)

    def log_train(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        if self._run.takes(names.KIND_TRAIN, global_step):
            super().log_train(global_step, logs_dict)

    def log_eval(self, global_step: int, logs_dict: dict[str, Any]) -> None:
        if self._run.takes(names.KIND_EVAL, global_step):
            super().log_eval(global_step, logs_dict)


class EntropyTrainer(_UpstreamTrainer):  # type: ignore[misc]
    """Upstream's controller; what it logs goes to TensorBoard and W&B through upstream, and to ``metrics.jsonl``.

    It has no random generator of its own: the prompt loader has one, whose state is part of the loader's.
    """

    _states: dict[str, Any] | None = None  # from which the run goes on
    dumper: RolloutDumper | None = None

    best_eval_metric_value: float  # upstream's
    # States of a checkpoint whose evaluation or best checkpoint may have been cut off by an interruption, and the
    # metrics of that evaluation, if any.
    _unevaluated: dict[str, Any] | None = None
    _evaluated: Rows = []

    replayed: ReplayedSamples | None = None  # set if the run has no engines
    guide: Guide | None = None
    has_trained = False

    def __init__(self, pretrain: str, strategy: Any, *args: Any, **kwargs: Any) -> None:
        ppo_trainer.WandbLogger, ppo_trainer.TensorboardLogger = ResumedWandb, FlushedTensorboard
        ppo_trainer.compute_eval_metrics = eval_metrics
        if strategy.args.train.replay_rollouts:
            self.replayed = replayed = ReplayedSamples(strategy.args)
            ppo_trainer.prepare_datasets = lambda strategy, tokenizer: (replayed, None, replayed.max_steps)
        super().__init__(pretrain, strategy, *args, **kwargs)
        if self.replayed is None:
            self.max_steps = count_all_steps(self.args, len(self.prompts_dataloader))
        train = self.args.train
        if self.args.algo.guide.model_name_or_path:
            shared = self.actor_model_group.placement_group if train.colocate_all else None
            self.guide = Guide(start_guide(self.args, shared), self.args)
        self.engines = Engines(self.vllm_engines or [], train.max_restarts, train.stall_timeout)
        self.samples_generator: Any = self.replayed or OrderedSamplesGenerator(
            self.strategy,
            self.prompts_dataloader,
            self.eval_dataloader,
            SharedTokenizer(ray.put(self.tokenizer)),
            self.vllm_engines,
            recover=self._recover,
            guide=self.guide,
        )
        self.experience_maker = EntropyExperienceMaker(
            self.actor_model_group,
            self.critic_model_group,
            self.reward_model_group,
            self.reference_model_group,
            self.kl_ctl,
            self.strategy,
            self.tokenizer,
        )
        if self.args.logger.dump_rollouts:
            self.dumper = RolloutDumper(self.args, self.tokenizer, self.experience_maker.credit, self.max_steps)
            self.experience_maker.on_batch = self.dumper
        path = self.args.logger.metrics_path
        self.metrics_writer = MetricsWriter(path) if path else None
        self.heartbeat = Heartbeat(self.args.ckpt.path) if self.args.train.stall_timeout else None
        self.warnings: dict[str, str] = {}  # of the last step
        self.failed_saves: list[str] = []  # since the last step's metrics
        self.costs = StepCosts(self.args, self.actor_model_group, self.vllm_engines)
        self.spikes = Spikes(self.args.train.spike_zscore)

    def fit(self, global_step: int = 0) -> None:
        """Train as upstream does, after one evaluation if ``--eval.before_training`` asks for it.

        Raises:
            StoppedOnRequest: the run was asked to stop; if it made a step, its checkpoint is written.
            TrainingStopped: there was nothing to train on.
        """
        if stop_file(self.args).exists():
            stop_file(self.args).unlink(missing_ok=True)
            raise StoppedOnRequest("asked to, before its first step; there was nothing new to save.")
        wait_for_engines(self.vllm_engines or [])  # no rank waits for those that share its GPUs and do not sleep
        self.engines.watch()
        if self.guide:
            wait_for_engines(self.guide.engines, "guide engine")
            kill_hanging(self.guide.engines, self.args.train.stall_timeout, self.guide.hangs)
        states = self.init_checkpoint_states()
        step = states["global_step"]
        earlier: Rows = []
        if self.metrics_writer:
            settings = {"seed": self.args.train.seed, "estimator": self.args.algo.advantage.estimator}
            earlier = self.metrics_writer.begin(step, settings)
        if self.tensorboard_logger:
            self.tensorboard_logger.go_on(step)
        if self.eval_dataloader is not None and step > 0 and step % self.args.eval.steps == 0:
            self._unevaluated = states
            self._evaluated = [row for row in earlier if (row["kind"], row["step"]) == (names.KIND_EVAL, step)]
        elif self.eval_dataloader is not None and step == 0 and self.args.eval.before_training:
            self._evaluate(0)
        self._begin_step()
        try:
            super().fit(global_step)
        except StoppedOnRequest:
            self._flush_metrics()
            for tracker in (self.wandb_logger, self.tensorboard_logger):
                if tracker:
                    tracker.close()
            raise
        finally:
            if self.dumper:
                self.dumper.close()
        if not (step or self.has_trained):
            (low, high), credit = self.args.algo.dynamic_filtering_range, self.experience_maker.credit
            differs = "rewards that differ"
            if credit is not None and credit.needs_both:
                threshold = f"--algo.{credit.name}.success_threshold {credit.config.success_threshold:g}"
                differs = f"both successes and failures ({threshold})"
            raise TrainingStopped(
                "No step was trained, and no model is written: dynamic filtering dropped every prompt, as none had "
                f"responses with different scores, {differs} and a mean score between {low:g} and {high:g} "
                "(--algo.dynamic_filtering_range)."
            )
        if not self.has_trained:
            print(
                f"Warning: no step was trained after step {step}, that of the checkpoint, with --train.num_episodes "
                f"{self.args.train.num_episodes}; its model is written.",
                flush=True,
            )
        if self.heartbeat:
            self.heartbeat.clear()
        if self.metrics_writer:
            self.metrics_writer.phase(names.CHECKPOINT)  # upstream's driver has the model written now

    def end(self) -> None:
        """Note that the run has ended: its model is written, and nobody makes it again or stops it."""
        stop_file(self.args).unlink(missing_ok=True)
        if self.metrics_writer:
            self.metrics_writer.end()
            self._flush_metrics()

    def _flush_metrics(self) -> None:
        if (writer := self.metrics_writer) is not None:
            keep_trying(lambda path: writer.flush(), self.args.logger.metrics_path)

    def _evaluate(self, step: int) -> dict[str, float]:
        generation = {"temperature": self.args.eval.temperature}
        generation["n_samples_per_prompt"] = self.args.eval.n_samples_per_prompt
        return self.evaluate(step, **(self.generate_kwargs | generation))

    def _begin_step(self) -> None:
        self.costs.begin()
        self._show(names.GENERATION)

    def _show(self, phase: str) -> None:
        if self.metrics_writer:
            self.metrics_writer.phase(phase)
        if self.heartbeat:
            # How long sampling takes is up to engines and rewards, which are watched from here. Ranks wait meanwhile.
            sampling = phase in (names.GENERATION, names.EVALUATION)
            self.heartbeat.beat(answering(self._ranks()) if sampling else None)

    def _ranks(self) -> list[Any]:
        groups = self.actor_model_group, self.critic_model_group, self.reward_model_group, self.reference_model_group
        return [rank for group in groups if group is not None for rank in group._actor_handlers]

    def ppo_train(self, global_steps: int) -> dict[str, Any]:
        self._show(names.PPO_TRAIN)
        status = super().ppo_train(global_steps)
        if self.dumper:
            ranks = self.actor_model_group._actor_handlers
            self.dumper.trained(
                lambda: ray.get([r.__ray_call__.remote(lambda actor: actor.trainer.ratios.take()) for r in ranks])
            )
        return status

    def broadcast_to_vllm(self) -> None:
        """Send the weights as upstream does, including to engines that were restarted.

        Raises:
            TrainingStopped: an engine died during the transfer, or too many died before it.
        """
        if self.replayed is not None:  # upstream's fit sends a checkpoint's weights
            return
        self.engines.check()
        try:
            if self.heartbeat:
                self.heartbeat.beat(lambda: True)  # an engine may take as long as it needs to start
            self.engines.bring_back(self.actor_model_group)
            self._show(names.BROADCAST)
            super().broadcast_to_vllm()
        except ray.exceptions.RayError:
            self.engines.check()  # which names the engine, if the run stops because of it
            raise
        self._show(names.GENERATION)  # which may come next, or go on
        states, self._unevaluated = self._unevaluated, None
        if states is not None:  # upstream's fit sends a checkpoint's weights before it goes on
            step = states["global_step"]
            logs = self._evaluated[0] if self._evaluated else self._evaluate(step)
            self.save_best_checkpoint({name: x for name, x in logs.items() if x is not None}, step, states)

    def _recover(self, error: Exception) -> None:
        """Recover from an error in a rollout (see ``OrderedSamplesGenerator``); if no engine is left, wait for one.
        An error that ends the run does so once the last checkpoint is complete."""
        try:
            self.engines.recover(error)
        except Exception:
            if self.heartbeat:
                self.heartbeat.beat(lambda: True)  # ranks that write answer nobody else
            with suppress(ray.exceptions.RayError):  # of a rank that is gone too
                self._publish_checkpoint(wait=True)
            raise
        if not self.vllm_engines:
            self.broadcast_to_vllm()
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.vllm_engines, "wake_up")

    def train_step(self, rollout_samples: list[Any], global_step: int) -> tuple[dict[str, Any], int]:
        """Like upstream's; a replayed step has the number of the dumped one."""
        if self.replayed is not None:
            global_step = self.replayed.step - 1
        self._publish_checkpoint()  # written while engines sampled; should this step fail, the run goes on from there
        if self.args.train.max_restarts and self.args.vllm.enable_sleep:  # engines share the trainer's GPUs
            self.engines.wait_for_lost()
        self._show(names.MAKE_EXPERIENCE)
        generator = self.samples_generator
        if self.guide:
            self.experience_maker.rescued, generator.rescued = generator.rescued, []
        self.costs.sampled([*rollout_samples, *self.experience_maker.rescued])
        if self.dumper:
            self.dumper.step = global_step + 1  # the number that it is logged under
        coefficient = self.kl_ctl.value
        status, global_step = super().train_step(rollout_samples, global_step)
        if not math.isfinite(self.kl_ctl.value):  # an adaptive one follows the KL of skipped optimizer steps too
            self.kl_ctl.value = coefficient
        self.costs.trained()
        if self.replayed is None:
            status[names.TOKENS_SAMPLED] = float(generator.tokens)
        if self.guide:
            self.guide.step = global_step
            if self.args.algo.guide.rescue_batch:
                queue = generator.rescue
                status[names.RESCUE_QUEUED] = float(len(queue))
                status |= {names.RESCUE_RESCUED: float(queue.rescued), names.RESCUE_GIVEN_UP: float(queue.given_up)}
        if self.args.train.max_restarts:
            status[names.RESTARTS_ENGINES] = float(self.engines.restarts)
            status[names.DROPPED_PROMPTS] = float(self.samples_generator.dropped)
        status.update(self.experience_maker.metrics)
        if "ppo_clip_ratio" in status:
            status[names.CLIP_FRACTION] = status["ppo_clip_ratio"]
        maker, before = self.experience_maker, self.warnings
        self.warnings = step_warnings(status, maker.outcome, self.args, maker.credit)
        for name in self.warnings.keys() - before.keys():
            print(f"Warning, from step {global_step} on: {self.warnings[name]}", flush=True)
        return status, global_step

    def _compute_rollout_stats(self, experiences: list[Experience]) -> dict[str, float]:
        """Like upstream's, over the step's own rows only."""
        own = [one for one in experiences if not torch.as_tensor(one.info.get(names.RESCUE_ROWS, 0)).any()]
        return super()._compute_rollout_stats(own)

    def init_checkpoint_states(self) -> dict[str, Any]:
        """Load upstream's states, once; an adaptive KL coefficient, seeds and audits go on from where they were.

        A run that died before its first checkpoint was complete leaves a folder without one, for which upstream has no
        state to start from (https://github.com/OpenRLHF/OpenRLHF/pull/1208 left out its PPO trainer): it starts anew.
        """
        if self._states is None:
            self._states = states = super().init_checkpoint_states() or dict(_FRESH)
            if isinstance(self.kl_ctl, AdaptiveKLController):  # a fixed one is what the command line says
                self.kl_ctl.value = states.get(_KL_COEFFICIENT, self.kl_ctl.value)
            self.spikes.recent = states.get(_RECENT, {})
            self.samples_generator.dispatched = states["total_consumed_prompts"]
            if self.guide:
                self.guide.step = states["global_step"]
                if _RESCUE in states:
                    self.samples_generator.rescue.restore(states[_RESCUE])
            if self.replayed is not None:
                self.replayed.begin_after(states["global_step"])
                states["episode"] = 0
            audit = self.experience_maker.audit
            audit.batches, audit.closed = states.get(_AUDIT, (0, False))
        return self._states

    def restore_best_checkpoint_state(self, checkpoint_states: dict[str, Any]) -> None:
        """Like upstream's, but ``--ckpt.best_metric_key``, if given, decides: another metric's best is no bound."""
        asked, saved = self.best_eval_metric_key, checkpoint_states.get("best_eval_metric_key")
        if saved == asked or (not asked and saved != "none"):
            super().restore_best_checkpoint_state(checkpoint_states)

    def save_best_checkpoint(
        self, eval_metrics: dict[str, Any], global_step: int, client_states: dict[str, Any] | None = None
    ) -> None:
        best, states = self.best_eval_metric_value, self._completed(client_states)
        self._publish_checkpoint(wait=True)  # the failure of an asynchronous save would be taken for this one's
        saved = self._save(lambda: super(EntropyTrainer, self).save_best_checkpoint(eval_metrics, global_step, states))
        if not (self._publish_checkpoint(wait=True) and saved):
            self.best_eval_metric_value = best  # of the checkpoint that is saved
        self._begin_step()

    def _save(self, save: Callable[[], Any]) -> bool:
        """Call ``save``; return False if a checkpoint could not be written, in which case training goes on."""
        try:
            with write_errors(self.args.ckpt):
                save()
        except CheckpointWriteError as error:
            self.failed_saves.append(str(error))
            print(f"Warning: {error} Make room; training goes on, and the next save will try again.", flush=True)
            return False
        return True

    def _finish_checkpoint(self, wait: bool) -> None:
        if self.args.actor.backend == "megatron":  # DeepSpeed's checkpoints are whole when saving returns
            ray.get(self.actor_model_group.async_run_method(method_name="finish_checkpoint", wait=wait))

    def _publish_checkpoint(self, wait: bool = False) -> bool:
        """Have idle ranks give an asynchronous save its name, if it is written by now; return False if it failed."""
        return self._save(lambda: self._finish_checkpoint(wait))

    def _completed(self, client_states: dict[str, Any] | None) -> dict[str, Any]:
        """A checkpoint's states, with what upstream leaves out of them. Upstream also leaves a resumed run in an
        episode that the step ended; the loader then draws all of its prompts again (torchdata 0.11.0,
        StatefulDataLoader.__iter__)."""
        states, audit = dict(client_states or {}), self.experience_maker.audit
        if self.samples_generator.at_end_of_episode:
            states["episode"] += 1
        states |= {_KL_COEFFICIENT: float(self.kl_ctl.value), _RECENT: self.spikes.recent}
        if self.guide:
            states[_RESCUE] = self.samples_generator.rescue.state()
        return states | {_AUDIT: (audit.batches, audit.closed)}

    def save_logs_and_checkpoints(
        self, global_step: int, logs_dict: dict[str, Any] | None = None, client_states: dict[str, Any] | None = None
    ) -> None:
        self.has_trained = True
        self._publish_checkpoint()
        # Not earlier: upstream's fit adds up everything that is called timing (0.11.2, trainer/ppo_trainer.py).
        logs = dict(logs_dict or {}) | self.costs.end() | self.experience_maker.seconds
        for phase in names.PHASES:
            if logs.get(names.timing(phase)):
                sampled = phase == names.GENERATION and logs.get(names.TOKENS_SAMPLED)  # also those of dropped groups
                tokens = sampled or self.costs.response_tokens
                logs[names.tokens_per_second(phase)] = tokens / logs[names.timing(phase)]
        if self.metrics_writer:
            numbers = {name: value for name, value in logs.items() if is_number(value)}
            sample = dict(zip((names.SAMPLE, names.SAMPLE_REWARD), logs.get("generated_samples", ())))
            if sample:
                sample[names.SAMPLE] = sample[names.SAMPLE][-_SAMPLE_LENGTH:]
            failed = {names.WARNING_PREFIX + "checkpoint": " ".join(self.failed_saves)} if self.failed_saves else {}
            self.metrics_writer.write(names.KIND_TRAIN, global_step, numbers | sample | self.warnings | failed)
        self.failed_saves = []
        self.spikes.check(global_step, logs)
        ckpt, save_steps, stopping = self.args.ckpt, self.args.ckpt.save_steps, stop_file(self.args).exists()
        if stopping:
            ckpt.save_steps = 1  # upstream saves if the step is divisible by it
        states = self._completed(client_states) if global_step % ckpt.save_steps == 0 else client_states

        def save() -> None:
            self._show(names.CHECKPOINT)  # at every try
            self._latest_eval_metric_value = None  # of an earlier step: this one's evaluation follows
            super(EntropyTrainer, self).save_logs_and_checkpoints(global_step, logs, states)

        def save_at_last(path: str) -> None:
            with write_errors(ckpt):
                save()
                self._finish_checkpoint(wait=True)

        try:
            if stopping:
                keep_trying(save_at_last, ckpt.path)
            else:
                self._save(save)
        finally:
            ckpt.save_steps = save_steps
        if stopping:
            stop_file(self.args).unlink(missing_ok=True)
            left = f"which is saved in {ckpt.path}; the same command with --ckpt.load_enable goes on from there."
            if ckpt.disable_ds:
                left = "and --ckpt.disable_ds leaves no checkpoint to go on from."
            raise StoppedOnRequest(f"asked to, after step {global_step}, {left}")
        self._begin_step()

    def evaluate(self, global_step: int, **generate_kwargs: Any) -> dict[str, float]:
        self._show(names.EVALUATION)
        logs = super().evaluate(global_step, **generate_kwargs)
        if self.metrics_writer:
            samples = generate_kwargs["n_samples_per_prompt"]
            more = held_out_statistics(self.samples_generator.held_out, sources_of(self.eval_dataloader), samples)
            self.metrics_writer.write(names.KIND_EVAL, global_step, logs | more)
        self._begin_step()
        return logs
