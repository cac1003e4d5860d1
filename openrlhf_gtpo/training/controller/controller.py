"""The single controller: holds the run's models, engines, data and trackers, and trains step by step (``step.py``)."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import ray
import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController
from openrlhf.trainer.ray.vllm_engine import batch_vllm_engine_call
from openrlhf.utils.utils import get_tokenizer

from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.checks.origin import ORIGIN, Origin
from openrlhf_gtpo.training.controller.engines import Engines
from openrlhf_gtpo.training.controller.heartbeat import Watched
from openrlhf_gtpo.training.controller.metrics import (
    describe_rollout,
    eval_metrics,
    held_out_statistics,
    outcomes_line,
    sources_of,
    step_warnings,
)
from openrlhf_gtpo.training.controller.rollouts import LOADER, Rollouts
from openrlhf_gtpo.training.controller.saving import Saver
from openrlhf_gtpo.training.controller.step_costs import StepCosts
from openrlhf_gtpo.training.controller.stop import stop_file
from openrlhf_gtpo.training.controller.stream import Stream
from openrlhf_gtpo.training.controller.trackers import Trackers
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, Models
from openrlhf_gtpo.training.credit.old_policy import count_all_steps
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.rollout.sampler import Sampler
from openrlhf_gtpo.training.rows import Rollout
from openrlhf_gtpo.training.step import run_steps

_KL_COEFFICIENT = "kl_coefficient"  # in a checkpoint

# What a run starts from without a checkpoint, by upstream's names.
_FRESH: Mapping[str, Any] = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, LOADER: {}}


class Controller:
    """Trains; in the place of upstream's ``PPOTrainer``, whose constructor it has.

    It has no random generator of its own: the prompt loader has one, whose state is part of the loader's.

    Attributes:
        step: the last step that was trained; 0 before the first.
        episode: passes over the prompts that are complete.
        consumed: prompts that were drawn for the steps so far.
        sampling: what a ``Sampler`` is made with.
        rollouts: what the steps are trained on.
        rollout: the one of the step in progress, or of the last one.
        version: the step whose weights the engines have.
    """

    features_of_run: Sequence[Feature] = ()  # those that are on; the composition root sets them

    def __init__(
        self,
        pretrain: str,
        strategy: Any,
        actor: Any,
        critic: Any,
        reward: Any,
        reference: Any,
        engines: list[Any] | None,
        **unused: Any,
    ) -> None:
        self.args = args = strategy.args
        for section, name in ((args.eval, "steps"), (args.ckpt, "save_steps")):
            if getattr(section, name) == -1:
                setattr(section, name, math.inf)  # never
        self.models = Models(actor, critic, reward, reference)
        use_fast = not args.data.disable_fast_tokenizer
        self.tokenizer = get_tokenizer(pretrain, None, "left", strategy, use_fast=use_fast)
        kl, self.step, self.episode, self.consumed, self.version = args.algo.kl, 0, 0, 0, 0
        adapts = partial(AdaptiveKLController, kl.init_coef, kl.target, kl.horizon)
        self.kl_control = adapts() if kl.target else FixedKLController(kl.init_coef)
        self.engines = Engines(engines or [], args.train.max_restarts, args.train.stall_timeout)
        for feature in self.features_of_run:
            feature.args = args
        made = (feature.controller() for feature in self.features_of_run)
        self.features = [feature for feature in made if feature is not None]

        self.prompts: Any = None
        self.held_out: Any = None
        self.sampling: tuple[Any, ...] = ()
        if not args.rollout.is_sampled:  # a feature's sampler stands for the prompts' loader too
            self._take_sampler()
            self.prompts, self.max_steps = self.sampler, self.sampler.max_steps
            self.origin = Origin(args)
        else:
            self.prompts, self.held_out, _ = ppo_trainer.prepare_datasets(strategy, self.tokenizer)
            self.prompts.dataset.check_labels()
            self.origin = Origin(args, self.prompts.dataset, getattr(self.held_out, "dataset", None))
            self.max_steps = count_all_steps(args, len(self.prompts))
            shared = ray.put(self.tokenizer)
            self.sampling = (args, self.prompts, self.held_out, shared, self.engines.serving, self._recover)
            self._take_sampler()
        self.rollouts = (
            Stream(self, args.train.max_staleness)
            if args.train.partial_rollout_enable
            else Rollouts(self, args.train.async_enable)
        )
        self.rollout = Rollout([], 0, False)
        self.maker = ExperienceMaker(strategy, self.models, self.kl_control, self.tokenizer, self.features)
        self.trackers = Trackers(args)
        groups = [group for group in self.models if group is not None]
        self.watched = Watched(args, groups, self.rollouts.is_moving)
        self.saver = Saver(args, self.models, lambda: self._show(names.CHECKPOINT))
        self.costs = StepCosts(args, actor, engines)
        self.warnings: dict[str, str] = {}  # of the last step
        # States of a checkpoint whose evaluation or best checkpoint may have been cut off by an interruption, and the
        # metrics of that evaluation, if any.
        self._unevaluated: dict[str, Any] | None = None
        self._evaluated: Rows = []

    def _take_sampler(self) -> None:
        samplers = (feature.sampler(self) for feature in self.features)
        own = next((sampler for sampler in samplers if sampler is not None), None)
        self.sampler: Any = Sampler(*self.sampling) if own is None else own

    def get_max_steps(self) -> int:
        """Number of optimizer steps in the run, by which learning rates are scheduled."""
        return self.max_steps

    def fit(self) -> None:
        """Train, after one evaluation if ``--eval.before_training`` asks for it.

        Raises:
            StoppedOnRequest: the run was asked to stop; if it made a step, its checkpoint is written.
            TrainingStopped: there was nothing to train on.
        """
        if stop_file(self.args).exists():
            stop_file(self.args).unlink(missing_ok=True)
            raise StoppedOnRequest("asked to, before its first step; there was nothing new to save.")
        wait_for_engines(self.engines.serving)  # no rank waits for those that share its GPUs and do not sleep
        self.engines.watch()
        states = self._load()
        begun = self.step
        earlier = self.trackers.begin(begun)
        for feature in self.features:
            feature.begin(self)
        if self.held_out is not None and begun > 0 and begun % self.args.eval.steps == 0:
            self._unevaluated = states
            if not self.origin.has_other_questions(states.get(ORIGIN, {})):
                self._evaluated = [row for row in earlier if (row["kind"], row["step"]) == (names.KIND_EVAL, begun)]
        elif self.held_out is not None and begun == 0 and self.args.eval.before_training:
            self._evaluate()
        self._begin_step()
        try:
            if begun:  # keep engines and prompts in sync with the checkpoint
                self.send_weights()
                if states[LOADER]:
                    self.prompts.load_state_dict(states[LOADER])
            run_steps(self)
        except StoppedOnRequest:
            self.trackers.flush()
            self.trackers.close()
            raise
        finally:
            self.rollouts.end()
            for feature in self.features:
                feature.end()
        self.trackers.close()
        if not self.step:
            raise TrainingStopped(self._why_nothing_was_trained())
        if self.step == begun:
            print(
                f"Warning: no step was trained after step {begun}, that of the checkpoint, with --train.num_episodes "
                f"{self.args.train.num_episodes}; its model is written.",
                flush=True,
            )
        self.watched.clear()
        self.trackers.phase(names.CHECKPOINT)  # upstream's driver has the model written now

    def end(self) -> None:
        """Note that the run has ended: its model is written, and nobody makes it again or stops it."""
        stop_file(self.args).unlink(missing_ok=True)
        self.trackers.end()

    def _why_nothing_was_trained(self) -> str:
        if not self.args.algo.dynamic_filtering_enable:
            return (
                "No step was trained, and no model is written: in --train.num_episodes "
                f"{self.args.train.num_episodes} there were no --rollout.batch_size {self.args.rollout.batch_size} "
                "prompts to train on."
            )
        (low, high), credit = self.args.algo.dynamic_filtering_range, self.maker.credit
        differs = "rewards that differ"
        if credit is not None and credit.needs_both:
            threshold = f"--algo.{credit.name}.success_threshold {credit.config.success_threshold:g}"
            differs = f"both successes and failures ({threshold})"
        return (
            "No step was trained, and no model is written: dynamic filtering dropped every prompt, as none had "
            f"responses with different scores, {differs} and a mean score between {low:g} and {high:g} "
            "(--algo.dynamic_filtering_range)."
        )

    # The parts of a step, in their order.

    @contextmanager
    def phase(self, name: str, metrics: dict[str, Any]) -> Iterator[None]:
        """Show that a phase of the step goes on, and add to ``metrics`` the seconds that it took."""
        self._show(name)
        started = time.perf_counter()
        yield
        metrics[names.timing(name)] = metrics.get(names.timing(name), 0.0) + time.perf_counter() - started

    def sampled(self, rollout: Rollout) -> None:
        """The engines have done their part."""
        self.rollout = rollout
        self.saver.publish()  # written while engines sampled; should this step fail, the run goes on from there
        if self.args.train.max_restarts and self.args.vllm.enable_sleep:  # engines share the trainer's GPUs
            self.engines.wait_for_lost()
        self.costs.sampled([*rollout.rows, *rollout.others])

    def deal(self, experiences: list[Experience]) -> None:
        """Hand the replicas their rows."""
        if self.args.train.dynamic_batch_enable and not self.args.train.shares_prompts:
            experiences = balance_experiences(experiences, self.args)
        refs = []
        for group in filter(None, (self.models.actor, self.models.critic)):
            refs += group.async_run_method_batch(method_name="append", experience=experiences)
        ray.get(refs)

    def train(self, step: int) -> dict[str, Any]:
        """Have critic and policy train on the rows that they have, in the run's ``step``; returns their metrics."""
        groups: list[tuple[Any, dict[str, float]]] = []
        if self.models.critic is not None:
            groups.append((self.models.critic, {}))
        if step - 1 > self.args.critic.freezing_steps:
            groups.append((self.models.actor, {"kl_ctl": self.kl_control.value}))
        status: dict[str, Any] = {}
        if not self.args.ds.enable_sleep:
            refs = [ref for group, given in groups for ref in group.async_run_method(method_name="fit", **given)]
            for result in ray.get(refs):
                status |= result
            return status
        for group, given in groups:  # one after the other has the GPUs' memory
            ray.get(group.async_run_method(method_name="reload_states"))
            status |= ray.get(group.async_run_method(method_name="fit", **given))[0]
            ray.get(group.async_run_method(method_name="offload_states"))
        return status

    def send_weights(self) -> None:
        """Send the policy's weights to the engines, including those that were restarted. Their version is the last
        step.

        Raises:
            TrainingStopped: more engines died than the run allows.
            ray.exceptions.RayError: an engine died during the transfer.
        """
        if self.args.rollout.is_sampled:
            with self.rollouts.still():
                self._send_weights()

    def _send_weights(self) -> None:
        self.engines.check()
        try:
            self.watched.wait()  # an engine may take as long as it needs to start
            self.engines.bring_back(self.models.actor)
            self._show(names.BROADCAST)
            if self.args.vllm.enable_sleep:  # the key-value cache follows when engines sample
                batch_vllm_engine_call(self.engines.serving, "wake_up", tags=["weights"])
            pauses = self.args.train.partial_rollout_enable  # between two tokens; they go on if all have the weights
            if pauses:
                batch_vllm_engine_call(self.engines.serving, "pause_generation")
            ray.get(self.models.actor.async_run_method(method_name="broadcast_to_vllm", version=self.step))
            if pauses:
                batch_vllm_engine_call(self.engines.serving, "resume_generation")
        except ray.exceptions.RayError:
            self.engines.check()  # which names the engine, if the run stops because of it
            raise
        self.version = self.step
        if not self.rollouts.weights_sent():
            self.send_weights()
            return
        self._show(names.GENERATION)  # which may come next, or go on
        states, self._unevaluated = self._unevaluated, None
        if states is not None:  # a checkpoint's weights: its evaluation may have been cut off
            logs = self._evaluated[0] if self._evaluated else self._evaluate()
            evaluated = {name: value for name, value in logs.items() if value is not None}
            self.saver.save_if_best(evaluated, self.step, dict(states))
            self._begin_step()

    def adapt_kl_coefficient(self, metrics: Mapping[str, Any]) -> None:
        """Have an adaptive KL coefficient follow the KL of the step that was trained."""
        before, rollout = self.kl_control.value, self.args.rollout
        if "kl" in metrics:
            self.kl_control.update(metrics["kl"], rollout.batch_size * rollout.n_samples_per_prompt)
            if not math.isfinite(self.kl_control.value):  # skipped optimizer steps have a KL too
                self.kl_control.value = before

    def describe(self, rollout: Rollout, own: Sequence[Experience], metrics: Mapping[str, Any]) -> dict[str, Any]:
        """What is logged of the step besides its phases' own metrics."""
        self.costs.trained()
        args = self.args
        more = describe_rollout(own, self.tokenizer) | self.maker.metrics
        more[names.TIMING_STEP_TOTAL] = sum(metrics[names.timing(phase)] for phase in names.PHASES)
        if args.rollout.is_sampled:
            more[names.TOKENS_SAMPLED] = float(rollout.tokens)
        if args.train.max_restarts:
            more[names.RESTARTS_ENGINES] = float(self.engines.restarts)
            more[names.DROPPED_PROMPTS] = float(rollout.dropped)
        if self.rollouts.ahead:
            more |= self.rollouts.describe(rollout, self.step)
            more[names.TIMING_ROLLOUT] = rollout.seconds
            more[names.IDLE_TRAINER] = metrics[names.timing(names.GENERATION)]
        if "ppo_clip_ratio" in metrics:
            more[names.CLIP_FRACTION] = metrics["ppo_clip_ratio"]
        if args.algo.dynamic_filtering_enable:
            more["dynamic_filtering_pass_rate"] = rollout.passed
        return more

    def log(self, metrics: dict[str, Any], stays: bool) -> None:
        """Write the metrics of the step that was trained last to the trackers, with what leaves nothing to learn.

        Args:
            stays: as for ``Trackers.train``.
        """
        if self.step == 1 and (line := outcomes_line(self.maker.outcome, self.maker.credit)):
            print(line, flush=True)
        if self.step == 1 and self.args.train.shares_prompts and names.TOKENS_ROWS in metrics:
            computed, of_rows = metrics[names.TOKENS_COMPUTED], metrics[names.TOKENS_ROWS]
            print(f"Each prompt once: {computed:,.0f} tokens are trained on for rows of {of_rows:,.0f}.", flush=True)
        before = self.warnings
        self.warnings = step_warnings(metrics, self.maker.outcome, self.args, self.maker.credit)
        for name in self.warnings.keys() - before.keys():
            print(f"Warning, from step {self.step} on: {self.warnings[name]}", flush=True)
        self.saver.publish()
        metrics |= self.costs.end() | self.maker.seconds
        seconds = {phase: metrics.get(names.timing(phase), 0.0) for phase in names.PHASES}
        if self.rollouts.ahead:
            metrics[names.IDLE_ENGINES] = max(0.0, metrics[names.TIMING_STEP_WALL] - self.rollouts.take_busy())
            seconds[names.GENERATION] = metrics[names.TIMING_ROLLOUT]
        for phase in names.PHASES:
            if seconds[phase]:
                # The engines' are all that were sampled, those of dropped groups too.
                sampled = phase == names.GENERATION and metrics.get(names.TOKENS_SAMPLED)
                tokens = sampled or self.costs.response_tokens
                metrics[names.tokens_per_second(phase)] = tokens / seconds[phase]
        shown = {name: value for name, value in metrics.items() if name != "generated_samples"}
        print(f"Global step {self.step}: {shown}", flush=True)
        failures = self.saver.take_failures()
        notes = self.warnings | ({names.WARNING_PREFIX + "checkpoint": failures} if failures else {})
        self.trackers.train(self.step, metrics, notes, stays)

    # Between steps.

    def save(self) -> None:
        """Save a checkpoint if one is due.

        Raises:
            StoppedOnRequest: the run was asked to stop, and this step is saved.
        """
        if not stop_file(self.args).exists():
            if self.saver.due(self.step):
                self.saver.save(self.step, self._states())
            self._begin_step()
            return
        self.saver.save_at_last(self.step, self._states())
        stop_file(self.args).unlink(missing_ok=True)
        left = f"which is saved in {self.args.ckpt.path}; the same command with --ckpt.load_enable goes on from there."
        if self.args.ckpt.disable_ds:
            left = "and --ckpt.disable_ds leaves no checkpoint to go on from."
        raise StoppedOnRequest(f"asked to, after step {self.step}, {left}")

    def evaluate_if_due(self) -> None:
        """Evaluate ``--eval.dataset`` every ``--eval.steps`` steps, and keep the best checkpoint."""
        due = self.held_out is not None and self.step % self.args.eval.steps == 0
        if due and not self.rollouts.has_failed:  # a run that goes on from here makes it up
            self.saver.save_if_best(self._evaluate(), self.step, self._states())
            self._begin_step()

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        args = self.args
        if not self.engines.serving:  # the last died while a step trained
            self.send_weights()
        with self.rollouts.still():
            self._show(names.EVALUATION)
            rows = self.sampler.evaluate(args.eval.temperature, args.eval.n_samples_per_prompt)
        sources = sources_of(self.held_out)
        metrics = eval_metrics(rows, sources, args.eval.n_samples_per_prompt)
        self.trackers.evaluation(
            self.step, metrics, held_out_statistics(rows, sources, args.eval.n_samples_per_prompt)
        )
        print(f"Evaluation of step {self.step}: {metrics}", flush=True)
        self._begin_step()
        return metrics

    def _begin_step(self) -> None:
        self.costs.begin()
        self._show(names.GENERATION)

    def _show(self, phase: str) -> None:
        self.trackers.phase(phase)
        self.watched.show(phase)

    def _load(self) -> dict[str, Any]:
        """Take up the states of the checkpoint that the policy has loaded; those of a new run if there is none.

        A run that died before its first checkpoint was complete leaves a folder without one, for which ranks have no
        states to start from (https://github.com/OpenRLHF/OpenRLHF/pull/1208 left out the PPO trainer): it starts anew.
        """
        states: dict[str, Any] = dict(_FRESH)
        if self.args.ckpt.load_enable:
            states |= ray.get(self.models.actor.ask_first("get_checkpoint_states")) or {}
        saved = states.get(ORIGIN, {})
        if self.origin.has_other_questions(saved):
            states["best_eval_metric_value"] = None
        self.saver.restore(states)
        if isinstance(self.kl_control, AdaptiveKLController):  # a fixed one is what the command line says
            self.kl_control.value = states.get(_KL_COEFFICIENT, self.kl_control.value)
        self.step, self.consumed = states["global_step"], states["total_consumed_prompts"]
        self.episode = states["episode"]
        for sentence in self.origin.differences(saved):
            print(f"Going on after step {self.step}: {sentence}", flush=True)
        self.sampler.drawn = self.consumed + self.rollouts.restore(states)
        self.sampler.of_pass = saved.get("drawn", 0)
        for feature in self.features:
            feature.restore(states, self.step)
        return states

    def _states(self) -> dict[str, Any]:
        """What a checkpoint of the last step holds besides the models.

        If the step ended an episode, the next one has begun: the loader of a run that goes on in the ended one would
        draw all of its prompts again (torchdata 0.11.0, StatefulDataLoader.__iter__).
        """
        with self.rollouts.still():
            states = {LOADER: self.prompts.state_dict(), **self.rollouts.state()}
            ahead = max(0, self.sampler.drawn - self.consumed)  # a replay draws none
            states[ORIGIN] = self.origin.state(self.sampler.of_pass, ahead)
        states |= {
            "episode": self.episode + int(self.rollout.exhausted),
            "global_step": self.step,
            "total_consumed_prompts": self.consumed,
            _KL_COEFFICIENT: float(self.kl_control.value),
        }
        for feature in self.features:
            states |= feature.state()
        return states

    def complete_checkpoint(self) -> None:
        """The run is going to end: wait until its last checkpoint is complete."""
        self.watched.wait()  # ranks that write answer nobody else
        with suppress(ray.exceptions.RayError):  # of a rank that is gone too
            self.saver.publish(wait=True)

    def _recover(self, error: Exception) -> None:
        """Recover from an error in a rollout; if no engine is left, wait for one. An error that ends the run does so
        once the last checkpoint is complete."""
        on_thread = self.rollouts.is_on_thread()  # beside a step that trains, and then sends weights
        try:
            self.engines.recover(error)
        except Exception:
            if not on_thread:
                self.complete_checkpoint()
            raise
        if not self.engines.serving and on_thread:
            self.rollouts.wait_for_weights()
        elif not self.engines.serving:
            self.send_weights()
            if self.args.vllm.enable_sleep:
                batch_vllm_engine_call(self.engines.serving, "wake_up")
