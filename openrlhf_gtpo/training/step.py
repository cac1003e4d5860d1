"""One training step, from prompts to new weights in the engines, and the loop that makes a run of steps."""

import math
from typing import TYPE_CHECKING, Any

import ray
from openrlhf.trainer.ppo_utils.experience import Experience, balance_experiences
from tqdm import tqdm

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.rows import Rollout

if TYPE_CHECKING:
    from openrlhf_gtpo.training.controller.controller import Controller


def run_step(run: "Controller") -> Rollout:
    """Train one step, and log it.

    Returns:
        what it was trained on; if that has no rows, nothing was.
    """
    metrics: dict[str, Any] = {}

    # Sample: the engines answer the next prompts, and each response comes back as a row with its reward.
    with run.phases.timed(names.GENERATION, metrics):
        rollout = run.answered(run.rollouts.next)
    if not rollout.rows:
        return rollout
    run.rollout, step = rollout, rollout.step or run.step + 1
    run.saver.publish()  # written while engines sampled; should this step fail, the run continues from there
    run.engines.wait_for_lost()
    run.log.costs.after_rollout([*rollout.rows, *rollout.others])

    # Score the rows with the old policy, reference and critic, then turn rewards and entropies into advantages. From
    # here on rows are upstream's experiences.
    with run.phases.timed(names.MAKE_EXPERIENCE, metrics):
        own = run.maker.make(rollout.rows)
        others = run.maker.make(rollout.others, own=False) if rollout.others else []

    # Train: rows are dealt to the replicas, which make the optimizer steps.
    deal(run, [*own, *others])
    with run.phases.timed(names.PPO_TRAIN, metrics):
        metrics |= train(run, step)
    run.step = step

    # Send weights, once no engine samples (``--train.async_enable``): their next rows are the new policy's. If the
    # next rollout has failed, this step is the run's last.
    with run.phases.timed(names.GENERATION, metrics):
        run.rollouts.drain()
    with run.phases.timed(names.BROADCAST, metrics):
        if not run.rollouts.has_failed:
            run.send_weights()

    # Log, also a step that a feature ends the run for.
    metrics |= run.log.describe(step, rollout, own, metrics)
    stays = False
    try:
        for feature in run.features:
            feature.on_step(step, metrics)
        stays = True
    finally:
        run.log.step(step, metrics, run.saver.take_failures(), stays)
    return rollout


def run_steps(run: "Controller") -> None:
    """Train on all rollouts. Engines and trainers take turns, or the engines are one rollout ahead
    (``--train.async_enable``)."""
    episodes = run.args.train.num_episodes
    run.rollouts.begin(run.episode, episodes)
    while run.episode < episodes:
        prompts = len(run.prompts)
        progress = tqdm(total=prompts, desc=f"Episode [{run.episode + 1}/{episodes}]")
        progress.update(run.consumed % max(prompts, 1))
        while True:
            rollout = run_step(run)
            run.consumed += rollout.prompts
            if rollout.rows:
                run.save()
                run.evaluate_if_due()
                progress.update(rollout.prompts)
            if rollout.exhausted:
                break
        run.episode += 1


def deal(run: "Controller", experiences: list[Experience]) -> None:
    """Hand the replicas of policy and critic their rows."""
    if run.args.train.dynamic_batch_enable and not run.args.train.shares_prompts:
        experiences = balance_experiences(experiences, run.args)
    refs = []
    for group in filter(None, (run.models.actor, run.models.critic)):
        refs += group.async_run_method_batch(method_name="append", experience=experiences)
    ray.get(refs)


def train(run: "Controller", step: int) -> dict[str, Any]:
    """Have critic and policy train on the rows that they have, in the run's ``step``; returns their metrics.

    An adaptive KL coefficient follows the step's KL.
    """
    groups: list[tuple[Any, dict[str, float]]] = []
    if run.models.critic is not None:
        groups.append((run.models.critic, {}))
    if step - 1 > run.args.critic.freezing_steps:
        groups.append((run.models.actor, {"kl_ctl": run.kl_control.value}))
    status: dict[str, Any] = {}
    if not run.args.ds.enable_sleep:
        refs = [ref for group, given in groups for ref in group.async_run_method(method_name="fit", **given)]
        for result in ray.get(refs):
            status |= result
    else:
        for group, given in groups:  # one after the other has the GPUs' memory
            ray.get(group.async_run_method(method_name="reload_states"))
            status |= ray.get(group.async_run_method(method_name="fit", **given))[0]
            ray.get(group.async_run_method(method_name="offload_states"))
    if "kl" in status:
        before, rollout = run.kl_control.value, run.args.rollout
        run.kl_control.update(status["kl"], rollout.batch_size * rollout.n_samples_per_prompt)
        if not math.isfinite(run.kl_control.value):  # skipped optimizer steps have a KL too
            run.kl_control.value = before
    return status
