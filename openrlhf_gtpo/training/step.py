"""One training step, from prompts to new weights in the engines, and the loop that makes a run of steps."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.rows import Rollout

if TYPE_CHECKING:
    from openrlhf_gtpo.training.controller.controller import Controller


def run_step(run: "Controller", sample: Callable[[], Rollout]) -> Rollout:
    """Train one step, and log it.

    Args:
        sample: returns what the step is trained on.

    Returns:
        that; if it has no rows, nothing was trained.
    """
    metrics: dict[str, Any] = {}

    # Sample: the engines answer the next prompts, and each response comes back as a row with its reward.
    with run.phase(names.GENERATION, metrics):
        rollout = sample()
    if not rollout.rows:
        return rollout
    step = rollout.step or run.step + 1
    run.sampled(rollout)

    # Values, advantages: what the old policy, and the other models, say of the rows; the credit shapes the rewards
    # with the entropies, and a group's rows compare theirs. From here on rows are upstream's experiences.
    with run.phase(names.MAKE_EXPERIENCE, metrics):
        own = run.maker.make(rollout.rows)
        others = run.maker.make(rollout.others, own=False) if rollout.others else []

    # Train: rows are dealt to the replicas, which make the optimizer steps.
    run.deal([*own, *others])
    with run.phase(names.PPO_TRAIN, metrics):
        metrics |= run.train(step)
    run.adapt_kl_coefficient(metrics)  # of the next step
    run.step = step

    # Send weights, once no engine samples (``--train.async_enable``): their next rows are the new policy's. If the
    # next rollout has failed, this step is the run's last.
    with run.phase(names.GENERATION, metrics):
        run.rollouts.drain()
    with run.phase(names.BROADCAST, metrics):
        if not run.rollouts.has_failed:
            run.send_weights()

    # Log, also a step that a feature ends the run for.
    metrics |= run.describe(rollout, own, metrics)
    stays = False
    try:
        for feature in run.features:
            feature.on_step(run.step, metrics)
        stays = True
    finally:
        run.log(metrics, stays)
    return rollout


def run_steps(run: "Controller") -> None:
    """Train on all rollouts. Engines and trainers take turns, or the engines are one rollout ahead
    (``--train.async_enable``)."""
    run.rollouts.begin(run.args.train.num_episodes - run.episode)
    episodes = run.args.train.num_episodes
    while run.episode < episodes:
        prompts = len(run.prompts)
        progress = tqdm(total=prompts, desc=f"Episode [{run.episode + 1}/{episodes}]")
        progress.update(run.consumed % max(prompts, 1))
        while True:
            rollout = run_step(run, run.rollouts.next)
            run.consumed += rollout.prompts
            if rollout.rows:
                run.save()
                run.evaluate_if_due()
                progress.update(rollout.prompts)
            if rollout.exhausted:
                break
        run.episode += 1
