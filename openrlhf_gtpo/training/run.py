"""From a command line to a run: parse and check it, patch upstream, and run upstream's ``train`` in Ray."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from openrlhf_gtpo import platform
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.metrics import show_phase
from openrlhf_gtpo.training import host, patch
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.checks import shared_prompts
from openrlhf_gtpo.training.checks.data import PROMPTS, check_data, first_prompt
from openrlhf_gtpo.training.checks.megatron import check_megatron
from openrlhf_gtpo.training.checks.model import Model
from openrlhf_gtpo.training.checks.results import check_earlier_runs
from openrlhf_gtpo.training.checks.reward import check_reward
from openrlhf_gtpo.training.checks.settings import check_images, check_settings
from openrlhf_gtpo.training.controller import stop
from openrlhf_gtpo.training.controller.checkpoint_disk import check_room
from openrlhf_gtpo.training.feature import Feature
from openrlhf_gtpo.training.features import FEATURES
from openrlhf_gtpo.training.settings import rules, upstream_parser
from openrlhf_gtpo.training.settings.frozen import changed, freeze, thaw
from openrlhf_gtpo.training.settings.guard import check_openrlhf, why_no_scheduler
from openrlhf_gtpo.training.settings.prompts import template_variables


def features_of(args: Arguments) -> list[Feature]:
    """Return the features that are on."""
    return [feature for kind in FEATURES if (feature := kind(args)).is_on()]


def train(args: Arguments) -> None:
    """Run OpenRLHF's training with parsed and checked arguments.

    Raises:
        UsageError: a user's mistake, found before any engine starts.
        TrainingStopped: bad data, or a checkpoint that cannot be written.
        Restartable: a process or a node died, or Ray did not start.
        StoppedOnRequest: the run was asked to stop; it can be resumed.
    """
    started = time.time()
    stop.prepare(args)
    # Decided here, because a supervised run's own process does not run the checks.
    policy, *_ = models = _models(args)
    args = changed(_for_model(policy, args), shared_prompts.decide(args, models) | {"logger.started": started})
    if args.rollout.is_sampled and (why := why_no_scheduler()):
        print(f"Rollouts are slower, because engines send one token at a time: {why}.", file=sys.stderr)
    patch.apply(args, features_of(args))
    show_phase(args.logger.metrics_path, names.START_RAY)
    host.start_ray(args, sum(host.gpus_of(args)))
    run(args)


def parse(argv: Sequence[str]) -> Arguments:
    """Parse ``argv`` into upstream's and this package's arguments, and complete them by all rules
    (``settings/rules.py``).

    Raises:
        UsageError: a flag or combination that cannot work with any estimator and backend.
    """
    check_openrlhf()
    platform.choose()
    given: set[str] = set()
    return rules.completed(freeze(upstream_parser.parse(argv, given)), frozenset(given))


def _for_model(policy: Model, args: Arguments) -> Arguments:
    """Return ``args`` with the values that features derive from the policy's checkpoint."""
    for feature in features_of(args):
        args = changed(args, feature.for_model(policy))
    return args


def check(args: Arguments) -> None:
    """Run all checks in their order, before anything starts. Each prevents something silent or expensive: training
    that learns something else, fails after minutes, or loses data.

    Raises:
        UsageError: the first mistake.
        OSError: a path cannot be used.
    """
    policy, *_ = models = _models(args)

    # Settings and folders, then checkpoints.
    check_settings(args)
    check_earlier_runs(args)
    for model in models:
        model.check_code("--actor.trust_remote_code")  # before anything reads more of a checkpoint
        model.check_files()
    policy.check_transferable()
    check_images(args, policy)
    check_megatron(args, policy)
    policy.check_vocabulary()
    # Rewards and data, with one trial of a reward function.
    if args.rollout.is_sampled:
        rewarded_by = check_reward(args)
        check_data(args, policy)
        if args.train.agent_func_path:
            from openrlhf_gtpo.training.rollout.turns import check_turns

            check_turns(rewarded_by, policy.tokenizer, template_variables(args.data.chat_template_kwargs))
        elif rewarded_by is not None and args.reward.remote_url and not policy.reads_images:
            from openrlhf_gtpo.training.rollout.rewards import try_reward

            if (first := first_prompt(args, policy.tokenizer, PROMPTS)) is not None:
                try_reward(rewarded_by, args.reward.remote_url[0], *first)
    # Features, weights, disks and the host.
    args = _for_model(policy, args)
    for feature in features_of(args):
        feature.check(policy)
    policy.check_weights()
    check_room(args, policy)
    host.check_gpus()
    host.check_ray()


def _models(args: Arguments) -> list[Model]:
    """Return the run's models, the policy first."""
    names = {"actor": args.actor.model_name_or_path, "critic": args.critic.model_name_or_path}
    names |= {} if args.reward.remote_url else {"reward": args.reward.model_name_or_path}
    trusted = args.actor.trust_remote_code
    return [
        Model(name, f"--{role}.model_name_or_path", trusted) for role, name in names.items() if name or role == "actor"
    ]


def run(args: Arguments) -> None:
    """Run upstream's ``train`` in the started Ray, and shut Ray down at the end.

    Raises:
        UsageError: the run cannot work on this cluster.
        TrainingStopped, Restartable, StoppedOnRequest: as in :func:`train`.
    """
    import ray
    from openrlhf.cli import train_ppo_ray
    from openrlhf.trainer import ppo_trainer, ppo_trainer_async

    from openrlhf_gtpo.training.controller.cluster_checks import check_nodes
    from openrlhf_gtpo.training.controller.failures import deaths_noticed, explained, raised_on
    from openrlhf_gtpo.training.controller.placement import waits_reported

    # Keep the groups and the controller that upstream makes.
    groups: list[Any] = []
    controllers: list[Any] = []
    make_group, make_controller = train_ppo_ray.RayActorGroup, ppo_trainer.PPOTrainer.remote

    def keep_group(*args: Any, **kwargs: Any) -> Any:
        groups.append(make_group(*args, **kwargs))
        return groups[-1]

    def keep_controller(*args: Any, **kwargs: Any) -> Any:
        controllers.append(make_controller(*args, **kwargs))
        return controllers[-1]

    train_ppo_ray.RayActorGroup = keep_group
    ppo_trainer.PPOTrainer = ppo_trainer_async.PPOTrainerAsync = SimpleNamespace(remote=keep_controller)

    # A terminated run ends its workers and engines, like an interrupted one. The handler that ray.init of 2.55 has
    # just installed would abort the process instead (https://github.com/ray-project/ray/issues/37288).
    with raised_on(signal.SIGTERM, lambda: SystemExit(128 + signal.SIGTERM)):
        try:
            with explained(), deaths_noticed(lambda: [rank for group in groups for rank in group._actor_handlers]):
                check_nodes(args)
                show_phase(args.logger.metrics_path, names.READ_PROMPTS)
                # A Ray started for this run has enough resources.
                own = platform.chosen_platform() == "cpu" and not os.environ.get("RAY_ADDRESS")
                with nullcontext() if own else waits_reported():
                    train_ppo_ray.train(thaw(args))
                ray.get([controller.end.remote() for controller in controllers])
        finally:
            ray.shutdown()
