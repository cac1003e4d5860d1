"""The controller of a run: makes its parts and holds what they share. ``step.py`` has the order of a step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import ray
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.kl_controller import AdaptiveKLController, FixedKLController
from openrlhf.utils.utils import get_tokenizer

from openrlhf_gtpo.errors import StoppedOnRequest, TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import Rows
from openrlhf_gtpo.training.actors.actor_trainer import wait_for_engines
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks.origin import ORIGIN, Origin
from openrlhf_gtpo.training.controller.engines import Engines
from openrlhf_gtpo.training.controller.heartbeat import Phases
from openrlhf_gtpo.training.controller.metrics import Log
from openrlhf_gtpo.training.controller.rollouts import LOADER, Rollouts
from openrlhf_gtpo.training.controller.saving import Saver
from openrlhf_gtpo.training.controller.step_costs import StepCosts
from openrlhf_gtpo.training.controller.stop import stop_file
from openrlhf_gtpo.training.controller.stream import Stream
from openrlhf_gtpo.training.controller.trackers import Trackers
from openrlhf_gtpo.training.credit.entropy_credit import EntropyCredit
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker, Models
from openrlhf_gtpo.training.credit.old_policy import count_all_steps
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.rollout.sampler import Sampler
from openrlhf_gtpo.training.rows import Rollout
from openrlhf_gtpo.training.step import run_steps

T = TypeVar("T")

_KL_COEFFICIENT = "kl_coefficient"  # in a checkpoint

# State of a run without a checkpoint, by upstream's names.
_FRESH: Mapping[str, Any] = {"episode": 0, "global_step": 0, "total_consumed_prompts": 0, LOADER: {}}


class Controller:
    """Runs training. Drop-in replacement for upstream's ``PPOTrainer`` (same constructor).

    It needs no random generator: only the prompt loader draws, and its state includes the generator's.

    Attributes:
        step: the last trained step; 0 before the first.
        episode: completed passes over the prompts.
        consumed: prompts drawn for the steps so far.
        sampling: arguments of a ``Sampler``.
        rollouts: the source of the steps' rollouts.
        rollout: the rollout of the current step, or of the last one.
    """

    features_of_run: Sequence[Feature] = ()  # features that are on; the composition root sets them

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
        # Models, KL coefficient, engines and features.
        self.args: Arguments = strategy.arguments
        args = self.args
        self.models = Models(actor, critic, reward, reference)
        use_fast = not args.data.disable_fast_tokenizer
        self.tokenizer = get_tokenizer(pretrain, None, "left", strategy, use_fast=use_fast)
        kl, self.step, self.episode, self.consumed = args.algo.kl, 0, 0, 0
        adapts = partial(AdaptiveKLController, kl.init_coef, kl.target, kl.horizon)
        self.kl_control = adapts() if kl.target else FixedKLController(kl.init_coef)
        train, sleep = args.train, args.vllm.enable_sleep
        pause = train.partial_rollout_enable
        self.engines = Engines(engines or [], train.max_restarts, train.stall_timeout, sleep, pause)
        for feature in self.features_of_run:
            feature.args = args
        made = (feature.controller() for feature in self.features_of_run)
        self.features = [feature for feature in made if feature is not None]

        # Data and the sampler, which a feature may replace.
        self.prompts: Any = None
        self.held_out: Any = None
        self.sampling: tuple[Any, ...] = ()
        if args.rollout.is_sampled:  # otherwise a feature's sampler is the prompts' loader too
            self.prompts, self.held_out, _ = ppo_trainer.prepare_datasets(strategy, self.tokenizer)
            self.prompts.dataset.check_labels()
            self.max_steps = count_all_steps(args, len(self.prompts))
            shared = ray.put(self.tokenizer)
            self.sampling = (args, self.prompts, self.held_out, shared, self.engines.serving, self.engines.recover)
        samplers = (feature.sampler(self) for feature in self.features)
        own: Any = next((sampler for sampler in samplers if sampler is not None), None)
        self.sampler: Any = Sampler(*self.sampling) if own is None else own
        if not args.rollout.is_sampled:
            self.prompts, self.max_steps = own, own.max_steps
        self.origin = Origin(args, *(getattr(each, "dataset", None) for each in (self.prompts, self.held_out)))

        # Rollouts, sampled when a step asks for them, a step ahead, or as a stream.
        def may_sample_ahead(steps: int) -> bool:
            return all(feature.may_sample_ahead(steps) for feature in self.features)

        sources = (self.sampler, self.prompts, self.engines)
        self.rollouts = (
            Stream(*sources, may_sample_ahead, train.max_staleness)
            if train.partial_rollout_enable
            else Rollouts(*sources, may_sample_ahead if train.async_enable else None)
        )
        # Advantages, metrics and checkpoints.
        self.rollout = Rollout([], 0, False)
        self.maker = ExperienceMaker(strategy, self.models, self.kl_control, self.tokenizer, self.features)
        self.trackers = Trackers(args)
        groups = [group for group in self.models if group is not None]
        self.phases = Phases(args, self.trackers, groups, self.rollouts.is_moving)
        self.saver = Saver(args, self.models, partial(self.phases.show, names.CHECKPOINT))
        costs, parts = StepCosts(args, actor, engines), (self.maker, self.engines, self.rollouts)
        self.log = Log(args, self.tokenizer, self.trackers, self.phases, costs, *parts)

    def get_max_steps(self) -> int:
        """Return the run's number of optimizer steps, for the learning-rate schedule."""
        return self.max_steps

    def fit(self) -> None:
        """Train, after one evaluation if ``--eval.before_training`` asks for it.

        Raises:
            StoppedOnRequest: the run was asked to stop; if it made a step, its checkpoint is written.
            TrainingStopped: there was nothing to train on.
        """
        # A request to stop may be there already.
        if stop_file(self.args).exists():
            stop_file(self.args).unlink(missing_ok=True)
            raise StoppedOnRequest("on request, before the first step; nothing to save.")
        wait_for_engines(self.engines.serving)  # ranks wait only for engines on other GPUs or asleep
        # Engines have started: load the checkpoint's state into every part.
        self.engines.watch()
        states = self._load()
        begun = self.step
        earlier = self.trackers.begin(begun)
        for feature in self.features:
            feature.begin(self)
        try:
            self.log.begin_step()
            if begun:  # engines and prompts follow the checkpoint, whose evaluation may have been cut off
                self.send_weights()
                if states[LOADER]:
                    self.prompts.load_state_dict(states[LOADER])
                self.evaluate_if_due(states, earlier)
            elif self.held_out is not None and self.args.eval.before_training:
                self.evaluate()
            run_steps(self)
        except StoppedOnRequest:
            self.trackers.flush()
            self.trackers.close()
            raise
        finally:
            self.rollouts.end()
            for feature in self.features:
                feature.end()
        # The end of the data. Upstream's driver has the model written next.
        self.trackers.close()
        if not self.step:
            raise TrainingStopped(_why_nothing_was_trained(self.args, self.maker.credit))
        if self.step == begun:
            print(
                f"Warning: the checkpoint's step {begun} was the last with --train.num_episodes "
                f"{self.args.train.num_episodes}; no step was trained, and the checkpoint's model is written.",
                flush=True,
            )
        self.phases.clear()
        self.trackers.phase(names.CHECKPOINT)

    def end(self) -> None:
        """Note that the run has ended: its model is written, so nobody has to resume or stop it."""
        stop_file(self.args).unlink(missing_ok=True)
        self.trackers.end()

    def answered(self, ask: Callable[[], T | None]) -> T:
        """Return the engines' answer. While ``ask`` returns None, because no engine is left, send weights and ask
        again.

        Raises:
            Exception: what ``ask`` raised; the last checkpoint is complete then.
        """
        while True:
            try:
                answer = ask()
            except Exception:
                self.phases.wait()  # ranks that write cannot answer in the meantime
                with suppress(ray.exceptions.RayError):  # a rank may be gone too
                    self.saver.publish(wait=True)
                raise
            if answer is not None:
                return answer
            self.send_weights()

    def send_weights(self) -> None:
        """Send the policy's weights to the engines; their version becomes the last step. A rollout that waits for
        weights is complete when this returns.

        Raises:
            TrainingStopped, ray.exceptions.RayError: from ``Engines.send_weights``.
        """
        is_complete = not self.args.rollout.is_sampled
        while not is_complete:
            with self.rollouts.still():
                self.engines.send_weights(self.models.actor, self.step, self.phases)
                is_complete = self.rollouts.weights_sent()
        self.phases.show(names.GENERATION)  # may come next, or is still running

    def save(self) -> None:
        """Save a checkpoint if one is due.

        Raises:
            StoppedOnRequest: the run was asked to stop; this step is saved.
        """
        if not stop_file(self.args).exists():
            if _is_due(self.step, self.args.ckpt.save_steps):
                self.saver.save(self.step, self._states())
            self.log.begin_step()
            return
        self.saver.save_at_last(self.step, self._states())
        stop_file(self.args).unlink(missing_ok=True)
        left = f"which is saved in {self.args.ckpt.path}; continue with the same command and --ckpt.load_enable."
        if self.args.ckpt.disable_ds:
            left = "and --ckpt.disable_ds leaves no checkpoint to continue from."
        raise StoppedOnRequest(f"on request, after step {self.step}, {left}")

    def evaluate_if_due(self, states: Mapping[str, Any] | None = None, earlier: Rows = ()) -> None:
        """Evaluate ``--eval.dataset`` every ``--eval.steps`` steps, and keep the best checkpoint.

        Args:
            states: of the checkpoint, if the run resumes from it now.
            earlier: lines of the run's metrics, which may include this evaluation.
        """
        if self.held_out is None or not _is_due(self.step, self.args.eval.steps) or self.rollouts.has_failed:
            return  # after a failed rollout, the run that resumes from here evaluates
        if self.origin.has_other_questions((states or {}).get(ORIGIN, {})):
            earlier = ()
        made = [row for row in earlier if (row["kind"], row["step"]) == (names.KIND_EVAL, self.step)]
        evaluated = made[0] if made else self.evaluate()
        numbers = {name: value for name, value in evaluated.items() if value is not None}
        self.saver.save_if_best(numbers, self.step, dict(states or self._states()))
        self.log.begin_step()

    def evaluate(self) -> dict[str, float]:
        """Evaluate ``--eval.dataset``; returns upstream's metrics."""
        self.phases.show(names.EVALUATION)
        temperature, samples = self.args.eval.temperature, self.args.eval.n_samples_per_prompt
        rows = self.engines.ask(partial(self.sampler.evaluate, temperature, samples))
        metrics = self.log.evaluation(
            self.step, self.answered(lambda: rows.result() if self.engines.wait(rows) else None), self.held_out
        )
        self.log.begin_step()
        return metrics

    def _load(self) -> dict[str, Any]:
        """Restore the state of the checkpoint that the policy has loaded; without one, the state of a new run.

        A run that died before its first complete checkpoint leaves a folder without one, and ranks have no state then
        (https://github.com/OpenRLHF/OpenRLHF/pull/1208 left out the PPO trainer): the run starts over.
        """
        states: dict[str, Any] = dict(_FRESH)
        if self.args.ckpt.load_enable:
            states |= ray.get(self.models.actor.ask_first("get_checkpoint_states")) or {}
        saved = states.get(ORIGIN, {})
        if self.origin.has_other_questions(saved):
            states["best_eval_metric_value"] = None
        self.saver.restore(states)
        if isinstance(self.kl_control, AdaptiveKLController):  # a fixed one comes from the command line
            self.kl_control.value = states.get(_KL_COEFFICIENT, self.kl_control.value)
        self.step, self.consumed = states["global_step"], states["total_consumed_prompts"]
        self.episode = states["episode"]
        for sentence in self.origin.differences(saved):
            print(f"Resuming after step {self.step}: {sentence}", flush=True)
        self.sampler.drawn = self.consumed + self.rollouts.restore(states)
        self.sampler.of_pass = saved.get("drawn", 0)
        for feature in self.features:
            feature.restore(states, self.step)
        return states

    def _states(self) -> dict[str, Any]:
        """Return what a checkpoint of the last step holds besides the models.

        If the step ended an episode, the state says that the next one has begun. Otherwise the loader of a resumed run
        would draw all prompts of the ended episode again (torchdata 0.11.0, StatefulDataLoader.__iter__).
        """
        with self.rollouts.still():
            states = self.rollouts.state()
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


def _is_due(step: int, every: float) -> bool:
    return every > 0 and step % every == 0  # infinity: never


def _why_nothing_was_trained(args: Arguments, credit: EntropyCredit | None) -> str:
    if not args.algo.dynamic_filtering_enable:
        return (
            "No step was trained, and no model is written: --train.num_episodes "
            f"{args.train.num_episodes} had fewer than --rollout.batch_size {args.rollout.batch_size} "
            "prompts; give more data."
        )
    low, high = args.algo.dynamic_filtering_range
    differs = "different rewards"
    if credit is not None and credit.needs_both:
        threshold = f"--algo.{credit.name}.success_threshold {credit.config.success_threshold:g}"
        differs = f"both successes and failures ({threshold})"
    return (
        "No step was trained, and no model is written: dynamic filtering dropped every prompt, because no prompt's "
        f"responses had different scores, {differs} and a mean score between {low:g} and {high:g} "
        "(--algo.dynamic_filtering_range)."
    )
