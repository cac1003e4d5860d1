"""Where a run takes entropies and old log-probs from: ``--rollout.entropy`` and ``--rollout.log_probs``, checked
against every flag that has a say in it."""

import sys

from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.training.arguments import Arguments
from openrlhf_gtpo.training.credit.entropy_credit import captures_entropy
from openrlhf_gtpo.training.credit.old_policy import always_forwards, count_rows, count_steps
from openrlhf_gtpo.training.settings.frozen import changed
from openrlhf_gtpo.training.settings.guard import why_no_sampler_entropy, why_no_scheduler

_CORRECTION = "--algo.advantage.is_correction_level"


def choose_entropy(args: Arguments) -> str:
    """``--rollout.entropy``, with sampler or actor in the place of auto. Print a line on stderr for what may surprise
    a user.

    Raises:
        UsageError: a source that this run cannot have.
    """
    rollout, chosen = args.rollout, args.rollout.entropy
    rows = count_rows(args)
    steps = count_steps(rows, args.train.batch_size) * args.train.max_epochs
    if chosen != "actor":
        asked, chosen = chosen, "sampler"
        args = changed(args, {"rollout.entropy": chosen})
        why = impossible = _why_not(args)
        if impossible and asked == "sampler":
            raise UsageError(f"--rollout.entropy sampler cannot work here: {impossible}; leave it out.")
        if not impossible and always_forwards(args, rows):
            why = f"the {steps} optimizer steps of a rollout need its log-probs (--rollout.log_probs)"
            if rollout.joined_by:
                why = f"rows that train with a rollout's ({rollout.joined_by}) need its log-probs"
            elif args.critic.freezing_steps >= 0:
                why = "an actor that waits for its critic (--critic.freezing_steps) needs its log-probs"
            elif steps == 1:
                why = "KL as a reward is computed from its log-probs (--algo.kl.use_loss, or --algo.kl.init_coef 0)"
            why = f"the old-policy forward is done all the same: {why}"
        if not why and asked == "auto" and (why := why_no_scheduler()):
            why = f"vLLM would send the sampler's token by token, which may take longer than that forward: {why}"
        if why and asked == "sampler":
            print(f"--rollout.entropy sampler saves no time: {why}.", file=sys.stderr)
        elif impossible or why and not args.train.async_enable:  # whose actor is a later policy
            print(f"--rollout.entropy auto takes the actor's entropies: {why}.", file=sys.stderr)
            chosen = "actor"
    if rollout.log_probs == "sampler":
        _check_log_probs(changed(args, {"rollout.entropy": chosen}), steps)
        if steps > 1:
            print(
                f"--rollout.log_probs sampler: each of the {steps} optimizer steps of a rollout takes its own "
                f"log-probs as the old ones; only {_CORRECTION} bounds how far it is from the policy that sampled.",
                file=sys.stderr,
            )
    return chosen


def _why_not(args: Arguments) -> str | None:
    """The reason why the sampler cannot give this run's entropies, as a clause; None if it can."""
    estimator, images = args.algo.advantage.estimator, args.data.max_images_per_prompt
    for holds, why in (
        (
            not captures_entropy(args),
            f"--algo.advantage.estimator {estimator} reads no entropies, and there is no --logger.entropy_enable",
        ),
        (args.rollout.top_p != 1, f"--rollout.top_p {args.rollout.top_p:g} cuts the distribution that entropies need"),
        (images > 0, f"with --data.max_images_per_prompt {images}, image tokens lie between the sampled ones"),
        (args.rollout.forward_for is not None, args.rollout.forward_for),
    ):
        if holds:
            return why
    return why_no_sampler_entropy()


def _check_log_probs(args: Arguments, steps: int) -> None:
    coefficient = args.algo.kl.init_coef
    for refused, why in (
        (
            coefficient > 0 and not args.algo.kl.use_loss,
            f"leaves out the log-probs that --algo.kl.init_coef {coefficient:g} turns into a reward; give "
            "--algo.kl.use_loss too, or --algo.kl.init_coef 0",
        ),
        (
            args.algo.kl.unbiased_gradient and coefficient > 0 and steps > 1,
            f"leaves out the log-probs that --algo.kl.unbiased_gradient needs with {steps} optimizer steps; "
            "leave that flag out",
        ),
        (
            args.rollout.entropy == "actor",
            "leaves out the actor's forward, from which the entropies come; give --rollout.entropy sampler too",
        ),
        (
            args.rollout.joined_by is not None,
            f"leaves out the log-probs that a step needs if other rows join it; leave {args.rollout.joined_by} out",
        ),
        (
            args.critic.freezing_steps >= 0,
            "leaves out the log-probs that an actor needs if it waits for its critic; leave --critic.freezing_steps "
            "out",
        ),
        (
            args.algo.advantage.is_correction_level == "off",
            f"trains without a ratio to the old policy, and so needs {_CORRECTION} token or seq; give it too",
        ),
    ):
        if refused:
            raise UsageError(f"--rollout.log_probs sampler {why}, or leave it out.")
